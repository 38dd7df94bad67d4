// libFuzzer target: ParseConfig on arbitrary bytes.
// Holds for every input: no crash; an error has a one-line printable message; what is accepted is
// valid and survives the round trip through its canonical text.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "qevict/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const qevict::Result<qevict::Config> config = qevict::ParseConfig(text);
  if (!config.ok()) {
    for (const char c : config.status().message()) {
      if (c < 0x20 || c > 0x7E) std::abort();
    }
    return 0;
  }
  if (!qevict::ValidateConfig(*config).ok()) std::abort();
  const qevict::Result<qevict::Config> again = qevict::ParseConfig(qevict::ToText(*config));
  if (!again.ok() || !(*again == *config)) std::abort();
  return 0;
}
