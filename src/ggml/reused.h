// A list whose elements keep their memory when it is cleared: what a step fills anew without
// asking the system.
#pragma once

#include <cstddef>
#include <vector>

namespace qevict::plugin {

template <typename T>
class Reused {
 public:
  /// One more element, as some earlier step has left it.
  T& Add() {
    if (size_ == elements_.size()) elements_.emplace_back();
    return elements_[size_++];
  }
  void clear() { size_ = 0; }
  void resize(size_t n) {
    if (n > elements_.size()) elements_.resize(n);
    size_ = n;
  }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return elements_[i]; }
  const T& operator[](size_t i) const { return elements_[i]; }
  T* begin() { return elements_.data(); }
  T* end() { return elements_.data() + size_; }
  const T* begin() const { return elements_.data(); }
  const T* end() const { return elements_.data() + size_; }
  /// Those that are not in use, too.
  const std::vector<T>& elements() const { return elements_; }

 private:
  std::vector<T> elements_;
  size_t size_ = 0;
};

}  // namespace qevict::plugin
