#include "qevict/version.h"

namespace qevict {

const char* Version() noexcept { return QEVICT_VERSION_STRING; }

}  // namespace qevict
