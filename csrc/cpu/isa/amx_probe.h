// Whether AMX's tiles give right answers here. To be asked only where cpuid and the operating system offer them.
#pragma once

namespace overtone::amx {

bool tile_product_is_right();

}  // namespace overtone::amx
