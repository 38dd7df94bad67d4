// Nothing may be thrown into the host: what the system refuses inside a callback becomes a Status.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "ggml/log.h"
#include "qevict/status.h"

namespace qevict::plugin {

/// fn() -> Status or void. Errors besides its own: kResourceExhausted for memory, kInternal for all
/// else.
template <typename F>
Status Guarded(const F& fn) {
  try {
    if constexpr (std::is_void_v<decltype(fn())>) {
      fn();
      return {};
    } else {
      return fn();
    }
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory");  // a text that needs none
  } catch (const std::exception& e) {
    return Internal(std::string("QEVICT: ") + e.what());
  }
}

/// For callbacks that can report nothing: what fails, or the system refuses, is logged. True if
/// nothing did.
template <typename F>
bool LogFailure(const char* what, const F& fn) {
  const Status status = Guarded(fn);
  if (status.ok()) return true;
  (void)Guarded([&] { LogError(std::string(what) + ": " + status.message()); });
  return false;
}

}  // namespace qevict::plugin
