"""Random module trees, wrapped at random and driven by random schedules, beside their unsharded twins, bit for bit.

    python tests/python/stress.py --seconds 60 --first-seed 1000     # exit code 1 if a case failed
    python tests/python/stress.py --seed 123 --world 2               # one case, printed
    python tests/python/stress.py --seed 123 --world 2 --shrink 300  # ... cut down for up to 300 s to what still fails

A case is made from its seed and world alone. `stress_models.py` has the modules, `stress_cases.py` makes a case,
`stress_twin.py` holds what must hold after every action, `stress_actions.py` the actions.
"""

from __future__ import annotations

import argparse
import sys

from stress_cases import make_case
from stress_run import run, sweep
from stress_shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="this case only")
    parser.add_argument("--world", type=int, action="append", help="ranks; may be given more than once (default: 1, 2, 3)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--cases", type=int, help="at most so many seeds")
    parser.add_argument("--shrink", type=float, default=0, metavar="SECONDS", help="with --seed: make a failing case smaller")
    options = parser.parse_args()
    worlds = options.world or [1, 2, 3]
    if options.seed is None:
        return 1 if sweep(options.first_seed, worlds, options.seconds, options.cases).failures else 0
    failed = False
    for world in worlds:
        case = make_case(options.seed, world)
        print(case, flush=True)
        outcome = run([case], world)
        for failure in outcome.failures:
            failed = True
            print(f"\nfailed at {failure.where}\n{failure.text}")
            if options.shrink:
                print("\nsmaller:", shrink(failure, options.shrink))
        print(outcome)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
