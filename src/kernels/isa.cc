// Choice of the instruction set: the best the CPU has, unless QEVICT_SIMD or ForceIsa names another
// one.
#include <atomic>
#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels/attention.h"
#include "kernels/attention_internal.h"

namespace qevict::kernels {
namespace {

/// Null where this build has no kernels for it.
const internal::KernelTable* Table(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return &internal::kScalarTable;
#ifdef QEVICT_HAVE_AVX2
    case Isa::kAvx2:
      return &internal::kAvx2Table;
#endif
#ifdef QEVICT_HAVE_AVX512
    case Isa::kAvx512:
      return &internal::kAvx512Table;
#endif
#ifdef QEVICT_HAVE_AVX512VNNI
    case Isa::kAvx512Vnni:
      return &internal::kAvx512VnniTable;
#endif
#ifdef QEVICT_HAVE_NEON
    case Isa::kNeon:
      return &internal::kNeonTable;
#endif
#ifdef QEVICT_HAVE_NEONDOT
    case Isa::kNeonDot:
      return &internal::kNeonDotTable;
#endif
    default:
      return nullptr;
  }
}

#if defined(__x86_64__)
/// Older clangs do not know this name in __builtin_cpu_supports.
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
}
#endif

bool CpuHas(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
  if (isa == Isa::kAvx2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kAvx512) return avx512;
  if (isa == Isa::kAvx512Vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
  return isa == Isa::kScalar;
#elif defined(__aarch64__)
  return isa == Isa::kScalar || isa == Isa::kNeon ||
         (isa == Isa::kNeonDot && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0);
#else
  return isa == Isa::kScalar;
#endif
}

Isa Best() {
  Isa best = Isa::kScalar;
  for (Isa isa : kAllIsas) {
    if (IsaSupported(isa)) best = isa;
  }
  return best;
}

std::string_view Requested() {
  const char* value = std::getenv("QEVICT_SIMD");  // NOLINT(concurrency-mt-unsafe): read only
  return value != nullptr ? value : "";
}

bool Find(std::string_view name, Isa& found) {
  for (Isa isa : kAllIsas) {
    if (name != IsaName(isa) || !IsaSupported(isa)) continue;
    found = isa;
    return true;
  }
  return false;
}

Isa FromEnvironment() {
  Isa isa = Best();
  Find(Requested(), isa);
  return isa;
}

std::atomic<Isa>& Active() {
  static std::atomic<Isa> active{FromEnvironment()};
  return active;
}

}  // namespace

Isa ActiveIsa() { return Active().load(std::memory_order_relaxed); }

std::string_view RefusedIsa() {
  Isa isa = Isa::kScalar;
  return Find(Requested(), isa) ? "" : Requested();
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kNeon:
      return "neon";
    case Isa::kNeonDot:
      return "neondot";
  }
  return "unknown";
}

bool IsaSupported(Isa isa) { return Table(isa) != nullptr && CpuHas(isa); }

bool ForceIsa(Isa isa) {
  if (!IsaSupported(isa)) return false;
  Active().store(isa, std::memory_order_relaxed);
  return true;
}

namespace internal {

const KernelTable& ActiveTable() { return *Table(ActiveIsa()); }
uint32_t ActiveKeyChannels() { return ActiveTable().key_channels; }

}  // namespace internal
}  // namespace qevict::kernels
