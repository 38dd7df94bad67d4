# How targets of this project are declared.
#
#   qevict_module(NAME base SOURCES a.cc b.cc DEPENDS kernels LIBRARIES Threads::Threads)
#     One module: the target qevict_<NAME>. A source named *_avx2.cc, *_avx512.cc, *_avx512vnni.cc
#     *_neon.cc or *_neondot.cc gets the flags of that instruction set, and is left out on other
#     processors; the module then sees QEVICT_HAVE_AVX2 (AVX512, AVX512VNNI, NEON, NEONDOT) as 1. No
#     other file gets such flags.
#   qevict_test(NAME base SOURCES a_test.cc b_test.cc DEPENDS base LABELS unit)
#     One GoogleTest program <NAME>_test that ctest runs. LABELS defaults to `unit`. SHARDS n: as n
#     tests <NAME>_1 ... that share the program's cases and can run side by side.
#     LABELS: `unit` (needs nothing), `parallel` (also run under the thread sanitizer), `slow`, `plugin`
#     (loads the tiny models), `model` (loads the real models). Tests find things by the environment:
#     QEVICT_SOURCE_DIR, QEVICT_LLAMA_BIN_DIR, QEVICT_PLUGIN, QEVICT_COMMAND, QEVICT_TINY_DIR, QEVICT_MODEL_DIR.
#   qevict_script_test(NAME server COMMAND python3 server_test.py LABELS plugin)
#     The same for a test that is a script.
#   qevict_bench(NAME attention SOURCES attention_bench.cc DEPENDS kernels)
#   qevict_fuzz(NAME codec SOURCES codec_fuzz.cc DEPENDS codecs)
#
# DEPENDS names modules (base, cache, ...); LIBRARIES names any other target.

include_guard(GLOBAL)

set(QEVICT_FLAGS_AVX2 -mavx2 -mfma -mf16c)
set(QEVICT_FLAGS_AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${QEVICT_FLAGS_AVX2})
set(QEVICT_FLAGS_AVX512VNNI -mavx512vnni ${QEVICT_FLAGS_AVX512})
set(QEVICT_FLAGS_NEON "")
set(QEVICT_FLAGS_NEONDOT -march=armv8.2-a+dotprod)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(QEVICT_ISAS AVX2 AVX512 AVX512VNNI)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(QEVICT_ISAS NEON NEONDOT)
else()
  set(QEVICT_ISAS "")
endif()

set(QEVICT_MODULES "" CACHE INTERNAL "modules with sources")

# Flags that every target of ours has and no consumer inherits.
function(qevict_target_options target)
  target_include_directories(${target} PRIVATE
    "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include" "${PROJECT_BINARY_DIR}/include")
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -ffp-contract=off
    $<$<BOOL:${QEVICT_WERROR}>:-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # False alarms in std::string's operator+ (GCC bug 105329).
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  if(QEVICT_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${QEVICT_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${QEVICT_SANITIZE})
    if(QEVICT_SANITIZE MATCHES "undefined")
      target_compile_options(${target} PRIVATE -fno-sanitize-recover=undefined)
    endif()
  endif()
  if(QEVICT_BUILD_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

function(qevict_link target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "DEPENDS;LIBRARIES")
  foreach(module IN LISTS arg_DEPENDS)
    target_link_libraries(${target} PRIVATE qevict_${module})
  endforeach()
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES})
endfunction()

# Splits off the sources of instruction sets that this processor lacks and gives the others their flags.
function(qevict_select_isa_sources out_sources out_definitions)
  set(kept "")
  set(definitions "")
  foreach(source IN LISTS ARGN)
    set(isa "")
    if(source MATCHES "_(avx2|avx512|avx512vnni|neon|neondot)\\.cc$")
      string(TOUPPER "${CMAKE_MATCH_1}" isa)
    endif()
    if(NOT isa)
      list(APPEND kept "${source}")
    elseif(isa IN_LIST QEVICT_ISAS)
      list(APPEND kept "${source}")
      list(APPEND definitions QEVICT_HAVE_${isa}=1)
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${QEVICT_FLAGS_${isa}}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES definitions)
  set(${out_sources} "${kept}" PARENT_SCOPE)
  set(${out_definitions} "${definitions}" PARENT_SCOPE)
endfunction()

function(qevict_module)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME" "SOURCES;DEPENDS;LIBRARIES")
  set(target qevict_${arg_NAME})
  if(NOT arg_SOURCES)  # a module that is headers alone, so far
    add_library(${target} INTERFACE)
    foreach(module IN LISTS arg_DEPENDS)
      target_link_libraries(${target} INTERFACE qevict_${module})
    endforeach()
    return()
  endif()
  qevict_select_isa_sources(sources definitions ${arg_SOURCES})
  add_library(${target} STATIC ${sources})
  qevict_target_options(${target})
  target_compile_definitions(${target} PUBLIC ${definitions})
  foreach(module IN LISTS arg_DEPENDS)
    target_link_libraries(${target} PUBLIC qevict_${module})
  endforeach()
  target_link_libraries(${target} PUBLIC ${arg_LIBRARIES})
  set(QEVICT_MODULES ${QEVICT_MODULES} ${arg_NAME} CACHE INTERNAL "modules with sources")
endfunction()

# Labels, time limit, environment, and the models that a label needs, made or fetched by a fixture.
function(qevict_test_properties name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS;ENVIRONMENT")
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
    if(CMAKE_CROSSCOMPILING)  # an emulator runs the tests
      set(arg_TIMEOUT 1800)
    endif()
  endif()
  set(environment
    "QEVICT_SOURCE_DIR=${PROJECT_SOURCE_DIR}"
    "QEVICT_TINY_DIR=${QEVICT_CACHE_FOLDER}/tiny"
    "QEVICT_MODEL_DIR=${QEVICT_CACHE_FOLDER}/models")
  if(QEVICT_LLAMA_FOUND)
    list(APPEND environment
      "QEVICT_LLAMA_BIN_DIR=${QEVICT_LLAMA_BIN_DIR}"
      "QEVICT_PLUGIN=${PROJECT_BINARY_DIR}/lib/libggml-qevict.so"
      "QEVICT_COMMAND=${PROJECT_BINARY_DIR}/bin/qevict")
  endif()
  set(fixtures "")
  if("plugin" IN_LIST arg_LABELS)
    list(APPEND fixtures tiny_models)
  endif()
  if("model" IN_LIST arg_LABELS)
    list(APPEND fixtures models)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "${environment};${arg_ENVIRONMENT}" FIXTURES_REQUIRED "${fixtures}")
endfunction()

# GoogleTest as installed; when cross compiling, from the sources that the distribution's package brings.
macro(qevict_find_gtest)
  if(CMAKE_CROSSCOMPILING)
    if(NOT TARGET GTest::gmock_main)
      add_subdirectory(/usr/src/googletest "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL)
    endif()
  else()
    find_package(GTest REQUIRED)
  endif()
endmacro()

function(qevict_test)
  if(NOT QEVICT_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;TIMEOUT;SHARDS"
    "SOURCES;DEPENDS;LIBRARIES;LABELS;ENVIRONMENT")
  if(NOT arg_SOURCES)
    return()
  endif()
  qevict_find_gtest()
  set(target ${arg_NAME}_test)
  add_executable(${target} ${arg_SOURCES})
  qevict_target_options(${target})
  qevict_link(${target} DEPENDS ${arg_DEPENDS} LIBRARIES ${arg_LIBRARIES} GTest::gmock_main)
  if(NOT arg_SHARDS)
    set(arg_SHARDS 1)
  endif()
  foreach(shard RANGE 1 ${arg_SHARDS})
    set(name ${arg_NAME})
    set(environment ${arg_ENVIRONMENT})
    if(arg_SHARDS GREATER 1)
      math(EXPR index "${shard} - 1")
      set(name ${arg_NAME}_${shard})
      list(APPEND environment GTEST_TOTAL_SHARDS=${arg_SHARDS} GTEST_SHARD_INDEX=${index})
    endif()
    add_test(NAME ${name} COMMAND ${target})
    qevict_test_properties(${name} LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT}
      ENVIRONMENT ${environment})
  endforeach()
endfunction()

function(qevict_script_test)
  if(NOT QEVICT_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;TIMEOUT" "COMMAND;LABELS;ENVIRONMENT")
  add_test(NAME ${arg_NAME} COMMAND ${arg_COMMAND} WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
  qevict_test_properties(${arg_NAME} LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT ${arg_ENVIRONMENT})
endfunction()

function(qevict_bench)
  if(NOT QEVICT_BUILD_BENCH)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME" "SOURCES;DEPENDS;LIBRARIES")
  find_package(benchmark REQUIRED)
  set(target ${arg_NAME}_bench)
  add_executable(${target} ${arg_SOURCES})
  qevict_target_options(${target})
  qevict_link(${target} DEPENDS ${arg_DEPENDS} LIBRARIES ${arg_LIBRARIES} benchmark::benchmark_main)
endfunction()

function(qevict_fuzz)
  if(NOT QEVICT_BUILD_FUZZ)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME" "SOURCES;DEPENDS;LIBRARIES")
  set(target ${arg_NAME}_fuzz)
  add_executable(${target} ${arg_SOURCES})
  qevict_target_options(${target})
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
  if(NOT TARGET fuzzers)
    add_custom_target(fuzzers)
  endif()
  add_dependencies(fuzzers ${target})
  qevict_link(${target} DEPENDS ${arg_DEPENDS} LIBRARIES ${arg_LIBRARIES})
endfunction()
