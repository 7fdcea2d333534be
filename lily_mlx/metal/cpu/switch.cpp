// Switching stacks. Only the registers that a call must keep are saved.
#include "fibers.h"

#include "stacks.h"

#if defined(__APPLE__)
#define SYMBOL(name) "_" name
#define HIDE(name) ""
#else
#define SYMBOL(name) name
#define HIDE(name) ".type " name ", %function\n"
#endif

#if defined(__x86_64__) && !defined(LILY_UCONTEXT)
// The way back is an indirect jump, not a return: returns are predicted by a stack that does not switch.
asm(".text\n.globl " SYMBOL("lily_switch") "\n" HIDE("lily_switch")
    SYMBOL("lily_switch") ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  popq %rcx\n"
    "  jmpq *%rcx\n");

namespace lily {
void* new_stack(char* top, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(top);
  *--frame = nullptr;  // keeps the alignment that a call would leave
  *--frame = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) {
    *--frame = nullptr;
  }
  return frame;
}
}  // namespace lily

#elif defined(__aarch64__) && !defined(LILY_UCONTEXT)
asm(".text\n.globl " SYMBOL("lily_switch") "\n" HIDE("lily_switch") ".p2align 4\n"
    SYMBOL("lily_switch") ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  br x30\n");

namespace lily {
void* new_stack(char* top, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(top - 160);
  for (int i = 0; i < 20; ++i) {
    frame[i] = nullptr;
  }
  frame[11] = reinterpret_cast<void*>(entry);  // x30
  return frame;
}
}  // namespace lily

#else
// Any other processor, or -DLILY_UCONTEXT: the C library's contexts, which also save the signal mask and are
// slower.
#include <ucontext.h>

namespace {
struct Context {
  ucontext_t context;
};
}  // namespace

namespace lily {
extern "C" void lily_switch(void** save, void* target) {
  Context here;
  *save = &here;
  swapcontext(&here.context, &static_cast<Context*>(target)->context);
}

void* new_stack(char* top, void (*entry)()) {
  Context* c = reinterpret_cast<Context*>((reinterpret_cast<uintptr_t>(top) - sizeof(Context)) & ~uintptr_t(63));
  getcontext(&c->context);
  char* bottom = top - (STACK_BYTES - MAX_COLOUR - GUARD_BYTES);
  c->context.uc_stack.ss_sp = bottom;
  c->context.uc_stack.ss_size = size_t(reinterpret_cast<char*>(c) - bottom);
  c->context.uc_link = nullptr;
  makecontext(&c->context, entry, 0);
  return c;
}
}  // namespace lily
#endif
