// Products with Q8_0 and the formats of large blocks.
#include "quantized_product.h"

namespace quire {
QUIRE_OTHER_FORMATS(QUIRE_PANEL_TOTALS)
}
