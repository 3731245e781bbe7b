#pragma once
// Everything public.
#include "ragged/comm.h"           // IWYU pragma: export
#include "ragged/comm_backends.h"  // IWYU pragma: export
#include "ragged/dbuffer.h"        // IWYU pragma: export
#include "ragged/error.h"          // IWYU pragma: export
#include "ragged/fully_shard.h"    // IWYU pragma: export
#include "ragged/granularity.h"    // IWYU pragma: export
#include "ragged/mesh.h"           // IWYU pragma: export
#include "ragged/placement.h"      // IWYU pragma: export
#include "ragged/plan.h"           // IWYU pragma: export
#include "ragged/plan_unit.h"      // IWYU pragma: export
#include "ragged/redistribute.h"   // IWYU pragma: export
#include "ragged/unit_options.h"   // IWYU pragma: export
