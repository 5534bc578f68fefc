// The recurrences of layers with a state: see quire/kernels/recurrent.py for the formulas.
#include "recurrent.h"
#include "recurrent_few.h"
#include "recurrent_many.h"
