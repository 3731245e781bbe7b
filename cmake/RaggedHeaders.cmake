# `ragged_headers` compiles every public header alone: each must include what it uses.
file(GLOB public_headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/include/ragged/*.h)
foreach(header ${public_headers})
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/headers/${header}.cc CONTENT "#include <${header}>\n")
  list(APPEND header_sources ${PROJECT_BINARY_DIR}/headers/${header}.cc)
endforeach()
add_library(ragged_headers OBJECT EXCLUDE_FROM_ALL ${header_sources})
target_link_libraries(ragged_headers PRIVATE ragged_engine)
