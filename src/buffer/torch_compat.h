#pragma once
// Every difference between the torch versions we build against (2.11 to 2.13), in one place.
//
//   2.13 holds autograd nodes in intrusive_ptr, 2.11 in shared_ptr; NodePtr is whichever it is.
//   2.13 can clear a storage's access error by name; in 2.11 the flag falls with the next data pointer.
#include <ATen/core/TensorBody.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <utility>

namespace ragged::compat {

using NodePtr = decltype(torch::autograd::Edge::function);

namespace detail {
template <class P>
struct NodeMaker;
template <class N>
struct NodeMaker<std::shared_ptr<N>> {
  template <class T, class... Args>
  static NodePtr make(Args&&... args) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  }
};
template <class N>
struct NodeMaker<c10::intrusive_ptr<N>> {
  template <class T, class... Args>
  static NodePtr make(Args&&... args) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
};
}  // namespace detail

template <class T, class... Args>
NodePtr make_node(Args&&... args) {
  return detail::NodeMaker<NodePtr>::template make<T>(std::forward<Args>(args)...);
}

// Any access to the storage's data raises `message` from now on.
inline void forbid_data_access(c10::StorageImpl& storage, const std::string& message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

template <class S>
void allow_data_access(S& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    // set_data_ptr_noswap, which always follows, re-reads this field.
    storage.get_extra_meta().custom_data_ptr_error_msg_ = std::nullopt;
  }
}

}  // namespace ragged::compat
