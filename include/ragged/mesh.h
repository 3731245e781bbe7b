#pragma once
// The mesh a buffer lives on: one Comm per mesh dim, outermost first. A plain FSDP mesh has one dim.
#include <vector>

#include "ragged/comm.h"

namespace ragged {

struct Mesh {
  std::vector<CommPtr> dims;
};

}  // namespace ragged
