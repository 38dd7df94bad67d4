#include "cache/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "kernels/attention.h"

namespace qevict {
namespace {

TEST(ConvertTest, EveryIsaAgreesWithBaseBitByBit) {
  std::vector<float> values;
  for (uint32_t x = 0; x < 0xFF000000u; x += 65521u) values.push_back(std::bit_cast<float>(x));
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    const float exact = F16ToF32(static_cast<uint16_t>(h));
    values.push_back(exact);
    values.push_back(std::nextafter(exact, 1e9f));
  }
  const kernels::Isa active = kernels::ActiveIsa();
  for (const kernels::Isa isa : kernels::kAllIsas) {
    if (!kernels::ForceIsa(isa)) continue;
    for (const Elem elem : {Elem::kF16, Elem::kBF16}) {
      std::vector<uint16_t> to(values.size());
      ConvertTo16(values.data(), values.size(), elem, to.data());
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(to[i], FromF32(values[i], elem))
            << kernels::IsaName(isa) << " " << std::bit_cast<uint32_t>(values[i]);
      }
      std::vector<uint16_t> halves(0x10000);
      std::vector<float> back(halves.size());
      for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
      ConvertTo32(halves.data(), halves.size(), elem, back.data());
      for (size_t i = 0; i < halves.size(); ++i) {
        const float want = ToF32(halves[i], elem);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(back[i])) << i;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(want)) << i;
        }
      }
    }
  }
  ASSERT_TRUE(kernels::ForceIsa(active));
}

}  // namespace
}  // namespace qevict
