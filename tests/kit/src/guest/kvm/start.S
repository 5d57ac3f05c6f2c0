/* The first instructions of the guest run in kernel mode, which some hosts interpret one by one, so
 * they are few. The loader enters at start32 (PVH: 32 bits, no paging). The guest then stays in
 * user mode. */

    .section .note.pvh, "a", @note
    .balign 4
    .long 4, 8, 18 /* bytes of the name, bytes of the value, XEN_ELFNOTE_PHYS32_ENTRY */
    .asciz "Xen"
    .quad start32

    .text
    .code32
    .globl start32
start32:
    cli
    cld
    mov %ebx, %edi /* the loader's data, the argument of run */
    movw $0x68, tss + 102 /* the offset of the port bitmap */
    mov $tss, %eax
    mov %ax, gdt + 0x2a
    shr $16, %eax
    mov %al, gdt + 0x2c
    mov %ah, gdt + 0x2f
    lgdt gdtr
    mov %cr4, %eax
    or $0x20, %eax /* PAE */
    mov %eax, %cr4
    mov $page_map, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx
    rdmsr
    or $0x100, %eax /* long mode */
    wrmsr
    mov %cr0, %eax
    or $0x80000001, %eax
    mov %eax, %cr0
    ljmp $0x08, $start64

    .code64
start64:
    mov $0x28, %eax
    ltr %ax
    mov $0x1b, %eax
    mov %eax, %ds
    mov %eax, %es
    mov $stack_end, %esp
    push $0x1b
    push $stack_end - 8
    push $2
    push $0x23
    push $run
    iretq

    .data
    .balign 8
gdtr:
    .word 0x37
    .long gdt
    .balign 8
gdt:
    .quad 0
    .quad 0x00af9a000000ffff /* 0x08: code of the kernel */
    .quad 0x00cf92000000ffff /* 0x10: data of the kernel */
    .quad 0x00cff2000000ffff /* 0x18: data of the user */
    .quad 0x00affa000000ffff /* 0x20: code of the user */
    .quad 0x0000890000002068, 0 /* 0x28: the task state, with the base above */

/* Identity-maps the first 4 GiB in pages of 2 MiB, also for user mode, which maps more by changing
 * the tables. */
    .balign 4096
    .globl page_map
page_map:
    .quad directories + 7
    .fill 511, 8, 0
    .globl directories
directories:
    .quad pages + 7, pages + 0x1007, pages + 0x2007, pages + 0x3007
    .fill 508, 8, 0
pages:
    .set at, 0
    .rept 2048
    .quad at + 0x87
    .set at, at + 0x200000
    .endr

/* User mode may use all ports: their bits are 0. */
    .bss
    .balign 4096
tss:
    .skip 0x2069
    .balign 4096
    .skip 65536
stack_end:
