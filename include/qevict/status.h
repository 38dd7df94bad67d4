// Status and Result: how every fallible qevict function reports failure.
// Why: the library runs inside other people's processes, so it never throws, prints, exits or
// aborts on bad input. Source: vocabulary after abseil's status codes; implementation our own.
#pragma once

#include <cassert>
#include <optional>
#include <string>
#include <utility>

namespace qevict {

/// What kind of failure happened; choose the most specific one.
enum class StatusCode : unsigned char {
  kOk = 0,
  kInvalidArgument,     ///< a value is wrong whatever the state (bad option, bad shape)
  kOutOfRange,          ///< an index or position lies outside what exists
  kFailedPrecondition,  ///< the call is legal, but not in this state
  kNotFound,            ///< a named thing does not exist
  kResourceExhausted,   ///< the byte budget or the machine's memory does not allow it
  kDataLoss,            ///< stored bytes are damaged
  kUnimplemented,       ///< recognised, but not supported
  kInternal,            ///< an invariant of qevict is broken: our bug
};

/// Success, or a code with one sentence that names the value and the limit.
/// Thread-compatible value type; copying an OK status allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) {
  return {StatusCode::kInvalidArgument, std::move(m)};
}
inline Status OutOfRange(std::string m) { return {StatusCode::kOutOfRange, std::move(m)}; }
inline Status FailedPrecondition(std::string m) {
  return {StatusCode::kFailedPrecondition, std::move(m)};
}
inline Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status ResourceExhausted(std::string m) {
  return {StatusCode::kResourceExhausted, std::move(m)};
}
inline Status DataLoss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
inline Status Unimplemented(std::string m) { return {StatusCode::kUnimplemented, std::move(m)}; }
inline Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

/// A value, or the Status that says why there is none. `status().ok()` iff a value is present.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {
    assert(!status_.ok());
  }  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  /// Requires ok().
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T* operator->() { return &*value_; }
  T& operator*() { return *value_; }
  const T* operator->() const { return &*value_; }
  const T& operator*() const { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

/// Returns the Status of an expression from the enclosing function if it is not OK.
#define QEVICT_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    ::qevict::Status qevict_status_ = (expr);        \
    if (!qevict_status_.ok()) return qevict_status_; \
  } while (false)

}  // namespace qevict
