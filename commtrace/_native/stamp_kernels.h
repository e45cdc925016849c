/* The two kernels of stamps.c, each of one thread. The driver makes code for the device of them when they are loaded;
   ptxas of CUDA 13.0 needs 10 registers at the most, for sm_75 to sm_120. */
#ifndef COMMTRACE_STAMP_KERNELS_H
#define COMMTRACE_STAMP_KERNELS_H

/* commtrace_replay begins a replay: it raises its number, which the host sees at `head`. All stamps run after it.
   commtrace_stamp reads the time first, and writes it, and then the number of the replay, into the slot of that. */
static const char STAMP_KERNELS[] =
    ".version 6.0\n"
    ".target sm_70\n"
    ".address_size 64\n"
    ".visible .entry commtrace_replay(.param .u64 counter, .param .u64 head)\n"
    "{\n"
    "  .reg .u64 %counter, %head, %number;\n"
    "  ld.param.u64 %counter, [counter];\n"
    "  ld.param.u64 %head, [head];\n"
    "  ld.relaxed.gpu.global.u64 %number, [%counter];\n"
    "  add.u64 %number, %number, 1;\n"
    "  st.relaxed.gpu.global.u64 [%counter], %number;\n"
    "  st.release.sys.global.u64 [%head], %number;\n"
    "  ret;\n"
    "}\n"
    ".visible .entry commtrace_stamp(.param .u64 counter, .param .u64 slots, .param .u32 mask)\n"
    "{\n"
    "  .reg .u64 %counter, %slot, %time, %number, %mask64, %offset;\n"
    "  .reg .u32 %mask;\n"
    "  mov.u64 %time, %globaltimer;\n"
    "  ld.param.u64 %counter, [counter];\n"
    "  ld.param.u64 %slot, [slots];\n"
    "  ld.param.u32 %mask, [mask];\n"
    "  ld.relaxed.gpu.global.u64 %number, [%counter];\n"
    "  cvt.u64.u32 %mask64, %mask;\n"
    "  and.b64 %offset, %number, %mask64;\n"
    "  shl.b64 %offset, %offset, 4;\n"
    "  add.u64 %slot, %slot, %offset;\n"
    "  st.relaxed.sys.global.u64 [%slot], %time;\n"
    "  st.release.sys.global.u64 [%slot+8], %number;\n"
    "  ret;\n"
    "}\n";

#endif
