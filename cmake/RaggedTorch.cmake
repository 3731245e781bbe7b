# libtorch as found by the Python that will load the extension: imported as `ragged_torch`, system includes.
find_package(Python3 COMPONENTS Interpreter Development.Module REQUIRED)
if(NOT DEFINED RAGGED_TORCH_DIR)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "import torch, os; print(os.path.dirname(torch.__file__), end='')"
    OUTPUT_VARIABLE torch_dir RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "torch is not installed for ${Python3_EXECUTABLE}; run `make` or `pip install -r requirements.txt` first")
  endif()
  set(RAGGED_TORCH_DIR ${torch_dir} CACHE PATH "folder of the torch package")
endif()

# Read from a file: importing torch takes seconds.
file(STRINGS ${RAGGED_TORCH_DIR}/version.py torch_version REGEX "^__version__")
string(REGEX REPLACE ".*'([^']*)'.*" "\\1" RAGGED_TORCH_VERSION "${torch_version}")

# The package's own CMake files look for CUDA, MKL and more; four libraries and two folders are all that is needed.
add_library(ragged_torch INTERFACE)
target_include_directories(ragged_torch SYSTEM INTERFACE
  ${RAGGED_TORCH_DIR}/include ${RAGGED_TORCH_DIR}/include/torch/csrc/api/include)
target_link_libraries(ragged_torch INTERFACE
  ${RAGGED_TORCH_DIR}/lib/libtorch.so ${RAGGED_TORCH_DIR}/lib/libtorch_cpu.so ${RAGGED_TORCH_DIR}/lib/libc10.so)
target_link_options(ragged_torch INTERFACE -Wl,-rpath,${RAGGED_TORCH_DIR}/lib)
target_compile_definitions(ragged_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)

add_library(ragged_torch_python INTERFACE)
target_link_libraries(ragged_torch_python INTERFACE ragged_torch ${RAGGED_TORCH_DIR}/lib/libtorch_python.so Python3::Module)
