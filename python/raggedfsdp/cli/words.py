"""Quantities for people."""

from __future__ import annotations


def count(numel: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if numel >= scale:
            return f"{numel / scale:,.1f} {unit}"
    return f"{numel:,}"


def size(numel_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if numel_bytes >= scale:
            return f"{numel_bytes / scale:,.1f} {unit}"
    return f"{numel_bytes} B"


def share(part: int, whole: int) -> str:
    return "0" if part == 0 else f"{part:,} ({100 * part / whole:.1g} %)"
