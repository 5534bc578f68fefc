// Products with formats of simple blocks and INT8.
#include "quantized_product.h"

namespace quire {
QUIRE_SIMPLE_FORMATS(QUIRE_PANEL_TOTALS)
}
