#pragma once
// A unit must be made of the same parameters in the same way on every rank; otherwise their buffers would not match.
#include <string>
#include <vector>

#include "engine/unit.h"
#include "ragged/unit_options.h"

namespace ragged {

// All ranks call it before they make the unit. `failure`: what went wrong here while the parameters were looked through;
// `more`: further lines that all ranks must say alike. UsageError on all ranks or on none (comm/agree.h). The host waits.
void agree_on_unit(const UnitOptions& options, const std::vector<ParameterSpec>& parameters, const std::string& failure,
                   const std::string& more = "");

}  // namespace ragged
