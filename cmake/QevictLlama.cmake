# Finds llama.cpp: a source folder and a finished build of it with shared libraries.
# Sets QEVICT_LLAMA_FOUND and, if true, the imported targets qevict_llama::{ggml-base,ggml,ggml-cpu,llama}
# and QEVICT_LLAMA_BIN_DIR (programs and libraries of that build).
# Without llama.cpp the plug-in and the command are switched off with a message; the core needs neither.

include_guard(GLOBAL)

if(NOT "$ENV{QEVICT_CACHE_DIR}" STREQUAL "")
  set(QEVICT_CACHE_FOLDER "$ENV{QEVICT_CACHE_DIR}")
else()
  set(QEVICT_CACHE_FOLDER "$ENV{HOME}/.cache/qevict")
endif()

function(qevict_find_llama)
  set(source "${QEVICT_LLAMA_SOURCE}")
  set(build "${QEVICT_LLAMA_BUILD}")
  if(NOT source)
    set(source "${QEVICT_CACHE_FOLDER}/llama.cpp")
    if(NOT build)
      set(build "${QEVICT_CACHE_FOLDER}/llama-build")
    endif()
  elseif(NOT build)
    set(build "${source}/build")
  endif()

  set(missing "")
  foreach(file IN ITEMS
      "${source}/ggml/include/ggml.h" "${source}/ggml/src/ggml-backend-impl.h"
      "${source}/include/llama.h" "${build}/bin/libggml-base.so" "${build}/bin/libggml.so"
      "${build}/bin/libggml-cpu.so" "${build}/bin/libllama.so")
    if(NOT EXISTS "${file}")
      list(APPEND missing "${file}")
    endif()
  endforeach()
  if(missing)
    list(GET missing 0 first)
    set(QEVICT_LLAMA_FOUND FALSE PARENT_SCOPE)
    set(QEVICT_LLAMA_MISSING "${first}" PARENT_SCOPE)
    return()
  endif()

  file(REAL_PATH "${source}" source)
  file(REAL_PATH "${build}" build)
  foreach(name IN ITEMS ggml-base ggml-cpu ggml llama)
    add_library(qevict_llama::${name} SHARED IMPORTED GLOBAL)
    set_target_properties(qevict_llama::${name} PROPERTIES
      IMPORTED_LOCATION "${build}/bin/lib${name}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${source}/ggml/include"
      INTERFACE_COMPILE_DEFINITIONS "GGML_SHARED;GGML_BACKEND_SHARED")
  endforeach()
  # libggml.so and libllama.so name their own dependencies, found by their RUNPATH at run time; the
  # linker needs the folder to follow them.
  set_property(TARGET qevict_llama::ggml PROPERTY INTERFACE_LINK_LIBRARIES
    "qevict_llama::ggml-base")
  set_property(TARGET qevict_llama::llama PROPERTY INTERFACE_LINK_LIBRARIES
    "qevict_llama::ggml;qevict_llama::ggml-cpu;qevict_llama::ggml-base")
  set_property(TARGET qevict_llama::llama PROPERTY INTERFACE_INCLUDE_DIRECTORIES
    "${source}/include;${source}/ggml/include")
  set_property(TARGET qevict_llama::llama APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS LLAMA_SHARED)

  set(QEVICT_LLAMA_FOUND TRUE PARENT_SCOPE)
  set(QEVICT_LLAMA_BIN_DIR "${build}/bin" PARENT_SCOPE)
  set(QEVICT_LLAMA_GGML_SRC "${source}/ggml/src" PARENT_SCOPE)
  message(STATUS "llama.cpp: source ${source}, build ${build}")
endfunction()

set(QEVICT_LLAMA_FOUND FALSE)
if(QEVICT_BUILD_PLUGIN)
  qevict_find_llama()
  if(NOT QEVICT_LLAMA_FOUND)
    if(QEVICT_LLAMA_SOURCE OR QEVICT_LLAMA_BUILD)
      message(FATAL_ERROR "llama.cpp is not usable: ${QEVICT_LLAMA_MISSING} does not exist. "
        "Build it with shared libraries (scripts/build_llama.sh) and set QEVICT_LLAMA_BUILD to its build folder.")
    endif()
    message(STATUS "llama.cpp not found (${QEVICT_LLAMA_MISSING}): the plug-in and the qevict command are off. "
      "scripts/build_llama.sh fetches and builds it.")
  endif()
endif()
