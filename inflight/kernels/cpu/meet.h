#pragma once

#include "kernels.h"

// Waits until all ranks of the group have called this as often as this rank. What a rank has written before it called, the others see
// afterwards. Returns 0, or the cause of the group's end, as collectives do (collectives.cpp).
int32_t meet(RankGroup* group);
