# One static library per folder under src/, so that an arrow in the wrong direction does not link.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_VISIBILITY_PRESET default)

find_program(RAGGED_CCACHE ccache)
if(RAGGED_CCACHE)
  # Paths of the sources relative, so that checkouts in several folders share what was compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${RAGGED_CCACHE})
endif()

# -ffp-contract=off: codes and updates must be bit-identical for every number of ranks, vector tails included.
add_compile_options(-Wall -Wextra -Wshadow -Wnon-virtual-dtor -ffp-contract=off)
if(RAGGED_WERROR)
  # GCC 12 warns about its own std::string (its bug 105651).
  add_compile_options(-Werror -Wno-error=restrict)
endif()
if(RAGGED_SANITIZE)
  # Instrumentation confuses the compiler's own flow analysis: the standard library's regex looks uninitialised.
  add_compile_options(-fsanitize=${RAGGED_SANITIZE} -fno-omit-frame-pointer -g1 -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=${RAGGED_SANITIZE})
endif()

# ragged_library(NAME SOURCES... ) in the current folder, with the public headers on its path.
function(ragged_library name)
  add_library(${name} STATIC ${ARGN})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
endfunction()
