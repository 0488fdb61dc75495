// Function multiversioning: the compiler makes a copy of a marked function for each instruction set
// and the loader picks one, so a portable build still runs at the width of the machine.
#pragma once

// target_clones needs ifunc support of the loader (glibc); elsewhere the default copy is all there
// is.
#if defined(__x86_64__) && defined(__GLIBC__)
#define NVFP4_DSMLA_TARGETS
#define NVFP4_DSMLA_VECTORISE \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define NVFP4_DSMLA_VECTORISE
#endif
