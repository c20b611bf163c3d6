// The kernels of the operators that a decode step is made of. Read by each_cpu.h.
#include "../norm_shift/kernel.h"
#include "../squared_relu/kernel.h"
#include "../time_mix_output/kernel.h"
#include "../time_mix_prepare/kernel.h"
#include "../wkv7/kernel.h"
