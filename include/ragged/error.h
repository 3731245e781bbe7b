#pragma once
// The three kinds of failure. A message says who, what was expected, what came, what to do.
//
//   UsageError     your input is wrong
//   CommError      a peer or a device failed; the message names it
//   InternalError  a bug of ours
#include <stdexcept>
#include <string>

namespace ragged {

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace ragged
