/* What the agent needs of Linux and of C, without any library or header: it is compiled by whatever compiler is there,
 * with nothing else installed. x86-64 only: the numbers of system calls and the start are of that machine. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

/* Pass number and arguments to the kernel; errors come back as negative numbers. */
long sys6(long number, long a, long b, long c, long d, long e, long f);
__asm__(".text\n.globl sys6\nsys6:\n"
        "mov %rdi,%rax\nmov %rsi,%rdi\nmov %rdx,%rsi\nmov %rcx,%rdx\nmov %r8,%r10\nmov %r9,%r8\nmov 8(%rsp),%r9\n"
        "syscall\nret\n");
__asm__(".globl _start\n_start:\nxor %ebp,%ebp\nmov %rsp,%rdi\nand $-16,%rsp\ncall start\n");

#define sys(n, a, b, c, d, e) sys6(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)

enum {
    SYS_read = 0, SYS_write = 1, SYS_close = 3, SYS_poll = 7, SYS_mmap = 9, SYS_munmap = 11, SYS_rt_sigaction = 13, SYS_ioctl = 16, SYS_dup2 = 33, SYS_nanosleep = 35,
    SYS_getpid = 39, SYS_socket = 41, SYS_clone = 56, SYS_execve = 59, SYS_exit = 60, SYS_wait4 = 61, SYS_kill = 62,
    SYS_fcntl = 72, SYS_chdir = 80, SYS_mkdir = 83, SYS_symlink = 88, SYS_umask = 95, SYS_geteuid = 107,
    SYS_setsid = 112, SYS_setgroups = 116, SYS_setresuid = 117, SYS_setresgid = 119, SYS_capset = 126,
    SYS_sysinfo = 99, SYS_mknod = 133, SYS_pivot_root = 155, SYS_prctl = 157, SYS_setrlimit = 160, SYS_chroot = 161, SYS_sync = 162, SYS_mount = 165,
    SYS_umount2 = 166, SYS_reboot = 169, SYS_sethostname = 170, SYS_clock_settime = 227, SYS_clock_gettime = 228,
    SYS_openat = 257, SYS_pipe2 = 293, SYS_finit_module = 313, SYS_close_range = 436,
};

enum {
    ENOENT = 2, EINTR = 4, ENXIO = 6, ENOEXEC = 8, EAGAIN = 11, EACCES = 13, EEXIST = 17, ENOTDIR = 20, EINVAL = 22, EPIPE = 32,
    E2BIG = 7, EPROTO = 71,
};

enum { O_RDONLY = 0, O_WRONLY = 1, O_RDWR = 2, O_NONBLOCK = 04000, O_DIRECTORY = 0200000, O_CLOEXEC = 02000000 };
enum { POLLIN = 1, POLLPRI = 2, POLLOUT = 4, POLLERR = 8, POLLHUP = 16 };
enum {
    MS_RDONLY = 1, MS_NOSUID = 2, MS_NODEV = 4, MS_NOEXEC = 8, MS_REMOUNT = 32, MS_BIND = 4096, MS_MOVE = 8192,
    MS_REC = 16384, MS_PRIVATE = 1 << 18, MNT_DETACH = 2,
};
enum { CLONE_NEWNS = 0x20000, CLONE_NEWIPC = 0x08000000, CLONE_NEWUSER = 0x10000000, CLONE_NEWPID = 0x20000000 };
enum { SIGKILL = 9, SIGPIPE = 13, SIGCHLD = 17 };
enum { S_IFCHR = 0020000, RLIMIT_CORE = 4, RLIMIT_NOFILE = 7, F_SETFL = 4, F_SETPIPE_SZ = 1031 };
enum { PR_CAPBSET_DROP = 24, PR_SET_NO_NEW_PRIVS = 38 };

struct pollfd { int fd; short events, revents; };
struct timespec { long sec, nsec; };

/* Compilers call these by themselves. */
void *memcpy(void *to, const void *from, u64 n) {
    void *at = to;
    __asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(n) : : "memory");
    return to;
}
void *memset(void *to, int c, u64 n) {
    void *at = to;
    __asm__ volatile("rep stosb" : "+D"(at), "+c"(n) : "a"(c) : "memory");
    return to;
}
void *memmove(void *to, const void *from, u64 n) {
    if ((u64)to <= (u64)from) return memcpy(to, from, n);
    while (n--) ((u8 *)to)[n] = ((const u8 *)from)[n];
    return to;
}

static u64 length(const char *s) { u64 n = 0; while (s[n]) n++; return n; }
static int begins(const char *s, const char *with) { while (*with) if (*s++ != *with++) return 0; return 1; }
static int has_slash(const char *s) { for (; *s; s++) if (*s == '/') return 1; return 0; }

/* Append to a string that has room for it; return its new end. */
static char *put(char *end, const char *s) { while ((*end = *s++)) end++; return end; }
static char *put_number(char *end, u64 n, u32 base) {
    char digits[24]; int i = 24;
    digits[--i] = 0;
    do digits[--i] = (char)('0' + n % base); while (n /= base);
    return put(end, digits + i);
}

static int open_at(int dir, const char *path, int flags) { return (int)sys(SYS_openat, dir, path, flags | O_CLOEXEC, 0, 0); }
static int open_file(const char *path, int flags) { return open_at(-100, path, flags); }

/* Write a short text to a file that is there, as the kernel's own files are set. */
static long write_file(const char *path, const char *text) {
    int fd = open_file(path, O_WRONLY);
    if (fd < 0) return fd;
    long done = sys(SYS_write, fd, text, length(text), 0, 0);
    sys(SYS_close, fd, 0, 0, 0, 0);
    return done;
}

/* Read a short file, with a NUL at its end. */
static long read_file(const char *path, char *into, u64 room) {
    int fd = open_file(path, O_RDONLY);
    if (fd < 0) return fd;
    long done = sys(SYS_read, fd, into, room - 1, 0, 0);
    into[done > 0 ? done : 0] = 0;
    sys(SYS_close, fd, 0, 0, 0, 0);
    return done;
}

/* Return the number after `name ` at the beginning of a line of a short text, 0 if it is not there. */
static u64 number_of(const char *text, const char *name) {
    while (*text) {
        if (begins(text, name)) {
            u64 n = 0;
            for (text += length(name); *text >= '0' && *text <= '9'; text++) n = n * 10 + (u64)(*text - '0');
            return n;
        }
        while (*text && *text++ != '\n') {}
    }
    return 0;
}

static void sleep_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    sys(SYS_nanosleep, &t, 0, 0, 0, 0);
}

static u64 monotonic_ns(void) {
    struct timespec t;
    sys(SYS_clock_gettime, 1, &t, 0, 0, 0);
    return (u64)t.sec * 1000000000 + (u64)t.nsec;
}
