#pragma once
// Ranks as threads for tests: each runs `fn`, all must end within a limit of seconds, the first failure is rethrown.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ragged/comm_backends.h"

namespace ragged::testing {

// fn(rank) on `size` threads. The failure rethrown is the first in time: the others are often its consequences.
inline void run_threads(std::int64_t size, const std::function<void(std::int64_t)>& fn,
                        std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  std::mutex mutex;
  std::condition_variable ended;
  std::exception_ptr first;
  std::vector<bool> running(static_cast<std::size_t>(size), true);
  std::int64_t left = size;
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::exception_ptr failure;
      try {
        fn(rank);
      } catch (...) {
        failure = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      if (failure && !first) first = failure;
      running[static_cast<std::size_t>(rank)] = false;
      --left;
      ended.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    if (!ended.wait_for(lock, limit, [&] { return left == 0; })) {
      // Threads cannot be killed, and joining them would hang: a red test is all that is left.
      std::string ranks;
      for (std::size_t r = 0; r < running.size(); ++r) ranks += running[r] ? " " + std::to_string(r) : "";
      std::fprintf(stderr, "run_threads: after %lld ms still running: ranks%s\n", static_cast<long long>(limit.count()),
                   ranks.c_str());
      std::abort();
    }
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

// fn(comm) on `size` ranks of a local comm. A rank that throws lets go of its comm, so that the others fail at once.
inline void run_ranks(std::int64_t size, const std::function<void(CommPtr)>& fn,
                      std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  auto comms = make_local_comms(size, limit / 2);
  run_threads(size, [&](std::int64_t rank) { fn(std::move(comms[static_cast<std::size_t>(rank)])); }, limit);
}

}  // namespace ragged::testing
