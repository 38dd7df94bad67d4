// The smallest program that uses an installed qevict: it links the core and runs it.
#include <qevict/version.h>

#include <cstdio>
#include <cstring>

int main() {
  std::printf("qevict %s\n", qevict::Version());
  return std::strcmp(qevict::Version(), QEVICT_VERSION_STRING) == 0 ? 0 : 1;
}
