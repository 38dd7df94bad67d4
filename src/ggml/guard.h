// Nothing may be thrown into the host: what the system refuses inside a callback becomes a Status.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "qevict/status.h"

namespace qevict::plugin {

/// fn() -> Status. Errors besides its own: kResourceExhausted for memory, kInternal for all else.
template <typename F>
Status Guarded(const F& fn) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory");  // a text that needs none
  } catch (const std::exception& e) {
    return Internal(std::string("QEVICT: ") + e.what());
  }
}

}  // namespace qevict::plugin
