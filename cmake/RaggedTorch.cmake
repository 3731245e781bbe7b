# libtorch as found by the Python that will load the extension: imported as `ragged_torch`, system includes.
if(RAGGED_PYTHON)
  find_package(Python3 COMPONENTS Interpreter Development.Module REQUIRED)
else()
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
endif()
if(NOT DEFINED RAGGED_TORCH_DIR)
  execute_process(  # find_spec does not import, which would take seconds
    COMMAND ${Python3_EXECUTABLE} -c "import os; from importlib.util import find_spec as f; print(os.path.realpath(f('torch').submodule_search_locations[0]), end='')"
    OUTPUT_VARIABLE torch_dir RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "torch is not installed for ${Python3_EXECUTABLE}; run `make` or `pip install -r requirements.txt` first")
  endif()
  set(RAGGED_TORCH_DIR ${torch_dir} CACHE PATH "folder of the torch package")
endif()

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${RAGGED_TORCH_DIR}/version.py)
file(STRINGS ${RAGGED_TORCH_DIR}/version.py torch_version REGEX "^__version__")
string(REGEX REPLACE ".*'([^']*)'.*" "\\1" RAGGED_TORCH_VERSION "${torch_version}")

# The package's own CMake files look for CUDA, MKL and more; four libraries and two folders are all that is needed.
add_library(ragged_torch INTERFACE)
target_include_directories(ragged_torch SYSTEM INTERFACE
  ${RAGGED_TORCH_DIR}/include ${RAGGED_TORCH_DIR}/include/torch/csrc/api/include)
target_link_libraries(ragged_torch INTERFACE
  ${RAGGED_TORCH_DIR}/lib/libtorch.so ${RAGGED_TORCH_DIR}/lib/libtorch_cpu.so ${RAGGED_TORCH_DIR}/lib/libc10.so)
target_compile_definitions(ragged_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)

if(RAGGED_PYTHON)
  add_library(ragged_torch_python INTERFACE)
  target_link_libraries(ragged_torch_python INTERFACE ragged_torch ${RAGGED_TORCH_DIR}/lib/libtorch_python.so Python3::Module)
endif()
