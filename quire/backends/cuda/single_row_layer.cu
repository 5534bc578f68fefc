// From attention's output to the end of a layer, for one row: see single_row_layer.h.
#include "hopper.h"
#include "single_row_layer.h"
