/* The guest agent: pid 1 of a virtual machine that runs one command.
 *
 * Owns the boot from the initramfs, the command's processes and the pumping of its streams. It knows nothing but its one
 * command: not the host, not disks. As pid 1 it makes a guest of the machine; started with any other pid it serves the
 * same protocol on its stdin, without a root or limits of the guest's, which is how it is tested on a host.
 *
 * Who is who: the agent; the init, pid 1 of the command's own pid namespace, which reaps what the command leaves and
 * with which all of it dies; the leader, which is the command.
 */
#include "sys.h"
#include "wire.h"
#include "sandbox.h"

enum { PORT_TRIES = 20000, LAST_WORDS_MS = 30000, PREPARE_TRIES = 5000, REHEARSAL_MS = 5000, FORGET_MS = 50, UNTOUCHED = 16 << 20 };

/* What the init tells the agent through a pipe: that the command runs, how it ended, or why it does not run. */
enum { TOLD_STARTED = 1, TOLD_END, TOLD_REFUSED };
struct told { u32 kind; int how, value, error, stage; u64 elapsed_ns; char text[64]; };

static int is_guest, rehearsing, port, initramfs = -1;

/* --- boot -------------------------------------------------------------------------------------------------------- */

static void restart(void) { sys(SYS_reboot, 0xfee1dead, 672274793, 0x1234567, 0, 0); }

/* Say why on the console, which the host shows, and end the machine: restarting ends QEMU. */
static void die(const char *why, long error) {
    char text[256];
    put(put_number(put(put(put(text, "<2>fanout-agent: "), why), ": error "), (u64)-error, 10), "\n");
    if (is_guest) write_file("/dev/kmsg", text), sleep_ms(20), restart();
    for (;;) sys(SYS_exit, 1, 0, 0, 0, 0);
}

static long need(long result, const char *what) {
    if (result < 0) die(what, result);
    return result;
}

/* Load the kernel modules that lie numbered, in an order that works, in a directory of the initramfs. */
static void load_modules(const char *directory) {
    for (u32 i = 0;; i++) {
        char path[64];
        put_number(put(path, directory), i, 10);
        int fd = open_at(initramfs, path, O_RDONLY);
        if (fd == -ENOENT) return;
        need(fd, path);
        long e = sys(SYS_finit_module, fd, "", 0, 0, 0);
        if (e != -EEXIST) need(e, path);
        sys(SYS_close, fd, 0, 0, 0, 0);
    }
}

static int open_port(void) {
    for (int i = 0; i < PORT_TRIES; i++) {
        int fd = open_file("/dev/vport0p1", O_RDWR | O_NONBLOCK);
        if (fd >= 0) return fd;
        if (fd != -ENOENT && fd != -ENXIO) die("the agent's port", fd); /* its name can be there before it is */
        sleep_ms(1);
    }
    die("the agent's port", -ENOENT);
    return -1;
}

static void boot(void) {
    sys(SYS_umask, 0, 0, 0, 0, 0);
    need(mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, 0), "mount /dev");
    for (int fd = open_file("/dev/null", O_RDWR); fd < 2; fd++) sys(SYS_dup2, fd, fd + 1, 0, 0, 0);
    initramfs = (int)need(open_file("/", O_DIRECTORY), "open the initramfs");
    load_modules("m/");
    /* pivot_root needs a root that is not the initramfs itself. */
    need(mount("tmpfs", "/t", "tmpfs", 0, "mode=0755,size=1m"), "mount a root");
    need(sys(SYS_chdir, "/t", 0, 0, 0, 0), "enter the new root");
    mkdir("r", 0755), mkdir("dev", 0755), mkdir("cg", 0755), mkdir("p", 0755), mkdir("s", 0755);
    need(mount("/dev", "dev", 0, MS_MOVE, 0), "move /dev");
    need(mount(".", "/", 0, MS_MOVE, 0), "move the root");
    need(sys(SYS_chroot, ".", 0, 0, 0, 0), "change the root");
    need(mount("proc", "/p", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0), "mount proc");
    need(mount("cgroup2", "/cg", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0), "mount cgroup2");
    need(write_file("/cg/cgroup.subtree_control", "+memory +pids +cpu"), "switch cgroup controllers on");
    need(mkdir("/cg/exec", 0755), "make a cgroup");
    need(sys(SYS_sethostname, "fanout", 6, 0, 0, 0), "set the host name");
    port = open_port();
}

/* --- what a request sets in the guest ---------------------------------------------------------------------------- */

static int set_limit(struct failure *f, const char *path, u64 value, const char *after) {
    char text[64];
    put(put_number(text, value, 10), after);
    must(STAGE_LIMITS, write_file(path, text), path);
    return 1;
}

static int set_limits(struct failure *f) {
    if (request.memory && !set_limit(f, "/cg/exec/memory.max", request.memory, "")) return 0;
    if (request.pids && !set_limit(f, "/cg/exec/pids.max", request.pids, "")) return 0;
    if (request.cpu_us && !set_limit(f, "/cg/exec/cpu.max", request.cpu_us, " 100000")) return 0;
    if (!set_limit(f, "/cg/exec/memory.oom.group", 1, "")) return 0;
    return set_limit(f, "/p/sys/user/max_user_namespaces", request.user_namespaces, "");
}

/* A command can be at its limit of memory and yet find a page to give up each time: its own program's, which it reads
 * again at once. The kernel sees progress in that and kills nobody, for minutes. So where it stalls for a quarter of two
 * seconds at its limit, with next to nothing to give up, it is out of memory. */
static int pressure = -1, starved;

static void watch_pressure(void) {
    static const char stall[] = "full 500000 2000000";
    pressure = request.memory ? open_file("/cg/exec/memory.pressure", O_RDWR | O_NONBLOCK) : -1;
    if (pressure >= 0 && sys(SYS_write, pressure, stall, sizeof stall, 0, 0) < 0) pressure = -1;
}

static int is_starving(void) {
    static char text[2048];
    if (read_file("/cg/exec/memory.current", text, sizeof text) <= 0) return 0;
    if (number_of(text, "") < request.memory / 16 * 15) return 0;
    if (read_file("/cg/exec/memory.stat", text, sizeof text) <= 0) return 0;
    return number_of(text, "file ") - number_of(text, "shmem ") < request.memory / 64;
}

static int set_clock_and_entropy(struct failure *f) {
    if (request.clock_ns) {
        struct timespec t = {(long)(request.clock_ns / NS), (long)(request.clock_ns % NS)};
        must(STAGE_REQUEST, sys(SYS_clock_settime, 0, &t, 0, 0, 0), "set the clock");
    }
    if (request.entropy_bytes) {
        struct { int bits, bytes; u8 data[512]; } pool;
        pool.bits = (int)request.entropy_bytes * 8, pool.bytes = (int)request.entropy_bytes;
        memcpy(pool.data, request.entropy, request.entropy_bytes);
        int fd = open_file("/dev/random", O_RDWR);
        must(STAGE_REQUEST, fd, "open /dev/random");
        must(STAGE_REQUEST, sys(SYS_ioctl, fd, 0x40085203 /* RNDADDENTROPY */, &pool, 0, 0), "add entropy");
        must(STAGE_REQUEST, sys(SYS_ioctl, fd, 0x5207 /* RNDRESEEDCRNG */, 0, 0, 0), "mix entropy in");
        sys(SYS_close, fd, 0, 0, 0, 0);
    }
    return 1;
}

struct address { u16 family, port; u32 ip; u8 rest[8]; };
struct interface { char name[16]; union { struct address address; short flags; u8 room[24]; } u; };
struct route { u64 pad1; struct address to, via, mask; u16 flags; short pad2; u64 pad3; void *pad4; short metric; char *dev; u64 mtu, window; u16 irtt; };

static long set_address(int fd, const char *name, u32 command, u32 ip) {
    struct interface i;
    memset(&i, 0, sizeof i);
    put(i.name, name);
    i.u.address.family = 2, i.u.address.ip = ip;
    return sys(SYS_ioctl, fd, command, &i, 0, 0);
}

static long interface_up(int fd, const char *name) {
    struct interface i;
    memset(&i, 0, sizeof i);
    put(i.name, name);
    i.u.flags = 0x41; /* up and running */
    return sys(SYS_ioctl, fd, 0x8914, &i, 0, 0);
}

static int set_network(struct failure *f) {
    int fd = (int)sys(SYS_socket, 2, 2 | O_CLOEXEC, 0, 0, 0);
    must(STAGE_NETWORK, fd, "socket");
    must(STAGE_NETWORK, interface_up(fd, "lo"), "loopback");
    if (request.network) {
        load_modules("n/");
        must(STAGE_NETWORK, set_address(fd, "eth0", 0x8916, u32_at(request.network)), "address");
        must(STAGE_NETWORK, set_address(fd, "eth0", 0x891c, u32_at(request.network + 4)), "netmask");
        must(STAGE_NETWORK, interface_up(fd, "eth0"), "eth0");
        struct route r;
        memset(&r, 0, sizeof r);
        r.to.family = r.via.family = r.mask.family = 2;
        r.via.ip = u32_at(request.network + 8), r.flags = 3; /* up, through a gateway */
        must(STAGE_NETWORK, sys(SYS_ioctl, fd, 0x890b, &r, 0, 0), "route");
    }
    sys(SYS_close, fd, 0, 0, 0, 0);
    return 1;
}

/* --- the command's processes ------------------------------------------------------------------------------------- */

static struct { int stdin, stdout, stderr, told; long init; } exec = {-1, -1, -1, -1, 0};
enum { TELL = 3, LEADS = 4 }; /* descriptors of the init: to the agent, from the leader */

static void tell(struct told *t) {
    sys(SYS_write, TELL, t, sizeof *t, 0, 0);
}

static void set_failure(struct told *t, const struct failure *f) {
    memset(t, 0, sizeof *t);
    t->kind = TOLD_REFUSED;
    t->stage = f->stage, t->error = f->error;
    for (u32 i = 0; i + 1 < sizeof t->text && f->text[i]; i++) t->text[i] = f->text[i];
}

static void tell_failure(const struct failure *f) {
    struct told t;
    set_failure(&t, f);
    tell(&t);
}

/* Become the command, or say through `fd` why not. */
static void lead(int in, int out, int err, int fd) {
    struct { int stage, error; } why = {STAGE_CWD, 0};
    u64 default_action[4] = {0, 0, 0, 0};
    sys(SYS_rt_sigaction, SIGPIPE, default_action, 0, 8, 0);
    sys(SYS_setsid, 0, 0, 0, 0, 0);
    sys(SYS_dup2, in, 0, 0, 0, 0), sys(SYS_dup2, out, 1, 0, 0, 0), sys(SYS_dup2, err, 2, 0, 0, 0);
    long e = sys(SYS_chdir, request.cwd, 0, 0, 0, 0);
    if (e == 0) why.stage = 0, e = execute();
    why.error = (int)-e;
    sys(SYS_write, fd, &why, sizeof why, 0, 0);
    sys(SYS_exit, 127, 0, 0, 0, 0);
}

/* Start the leader, reap until it ends, tell how. When this process ends, the kernel kills all that is left. */
static void be_init(int in, int out, int err) {
    struct failure f = {0, 0, ""};
    struct told t;
    memset(&t, 0, sizeof t);
    t.kind = TOLD_STARTED;
    struct { int stage, error; } why = {0, 0};
    int ready[2];
    sys(SYS_umask, 022, 0, 0, 0, 0);
    if (sys(SYS_pipe2, ready, O_CLOEXEC, 0, 0, 0) < 0 || !drop_rights(&f)) { tell_failure(&f); return; }
    long leader = sys(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (leader == 0) lead(in, out, err, ready[1]);
    if (leader < 0) { failed(&f, STAGE_PROCESS, leader, "fork"), tell_failure(&f); return; }
    u64 began = monotonic_ns();
    sys(SYS_dup2, ready[0], LEADS, 0, 0, 0);
    sys(SYS_close_range, LEADS + 1, ~0u, 0, 0, 0);
    long n;
    while ((n = sys(SYS_read, LEADS, &why, sizeof why, 0, 0)) == -EINTR) {}
    sys(SYS_close, LEADS, 0, 0, 0, 0);
    if (n == sizeof why && why.stage) { failed(&f, why.stage, -why.error, request.cwd), tell_failure(&f); return; }
    if (n != sizeof why) tell(&t); /* the exec closed it: the command runs */
    for (;;) {
        int status = 0;
        long pid = sys(SYS_wait4, -1, &status, 0, 0, 0);
        if (pid == -EINTR || (pid > 0 && pid != leader)) continue;
        t.kind = TOLD_END;
        t.how = n == sizeof why ? 2 : (status & 127) ? 1 : 0;
        t.value = t.how == 2 ? why.error : t.how == 1 ? status & 127 : status >> 8 & 255;
        t.elapsed_ns = monotonic_ns() - began;
        tell(&t);
        return;
    }
}

static void init_of_namespaces(int in, int out, int err, int told) {
    struct failure f = {0, 0, ""};
    int ends[4] = {in, out, err, told}, moved[4];
    /* Out of the way first: 0, 1, 2 stay /dev/null for the init, 3 and 4 are for what it tells and hears. */
    for (int i = 0; i < 4; i++) moved[i] = (int)sys(SYS_fcntl, ends[i], 1030 /* F_DUPFD_CLOEXEC */, 10, 0, 0);
    for (int i = 0; !is_guest && i < 3; i++) sys(SYS_dup2, open_file("/dev/null", O_RDWR), i, 0, 0, 0);
    sys(SYS_dup2, moved[3], TELL, 0, 0, 0);
    sys(SYS_fcntl, TELL, 2 /* F_SETFD */, 1 /* FD_CLOEXEC */, 0, 0);
    long e = is_guest && !rehearsing ? write_file("/cg/exec/cgroup.procs", "0") : 0;
    if (e < 0) failed(&f, STAGE_LIMITS, e, "enter the cgroup"), tell_failure(&f);
    else if (request.root && !make_root(&f)) tell_failure(&f);
    else be_init(moved[0], moved[1], moved[2]);
    sys(SYS_exit, 0, 0, 0, 0, 0);
}

static int start_command(struct failure *f) {
    int in[2], out[2], err[2], told[2];
    if (is_guest && !rehearsing && !(set_clock_and_entropy(f) && set_network(f) && set_limits(f))) return 0;
    must(STAGE_PROCESS, sys(SYS_pipe2, in, O_CLOEXEC, 0, 0, 0), "pipe");
    must(STAGE_PROCESS, sys(SYS_pipe2, out, O_CLOEXEC, 0, 0, 0), "pipe");
    must(STAGE_PROCESS, sys(SYS_pipe2, err, O_CLOEXEC, 0, 0, 0), "pipe");
    must(STAGE_PROCESS, sys(SYS_pipe2, told, O_CLOEXEC, 0, 0, 0), "pipe");
    sys(SYS_fcntl, out[0], F_SETPIPE_SZ, STDIN_WINDOW, 0, 0), sys(SYS_fcntl, in[0], F_SETPIPE_SZ, STDIN_WINDOW, 0, 0);
    u64 flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | SIGCHLD;
    if (!is_guest && sys(SYS_geteuid, 0, 0, 0, 0, 0) != 0) flags |= CLONE_NEWUSER;
    exec.init = sys(SYS_clone, flags, 0, 0, 0, 0);
    must(STAGE_PROCESS, exec.init, "clone");
    if (exec.init == 0) init_of_namespaces(in[0], out[1], err[1], told[1]);
    sys(SYS_close, in[0], 0, 0, 0, 0), sys(SYS_close, out[1], 0, 0, 0, 0);
    sys(SYS_close, err[1], 0, 0, 0, 0), sys(SYS_close, told[1], 0, 0, 0, 0);
    exec.stdin = in[1], exec.stdout = out[0], exec.stderr = err[0], exec.told = told[0];
    int fds[4] = {exec.stdin, exec.stdout, exec.stderr, exec.told};
    for (int i = 0; i < 4; i++) sys(SYS_fcntl, fds[i], F_SETFL, O_NONBLOCK, 0, 0);
    return 1;
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

static u8 inbox[HEADER + MAX_PAYLOAD]; /* what came from the host, at most one frame */
static u32 inbox_length;
static u8 outbox[HEADER + MAX_PAYLOAD]; /* the one frame on its way to the host */
static u32 outbox_at, outbox_length;
static u8 input[STDIN_WINDOW]; /* stdin that the command has not taken: a ring */
static u32 input_at, input_length, credit;
static int input_ended, running, finished, started, answer;
static struct told last;

static void queue(u32 kind, u32 length) {
    header(outbox, kind, length);
    outbox_at = 0, outbox_length = HEADER + length;
}

static void close_end(int *fd) {
    if (*fd >= 0) sys(SYS_close, *fd, 0, 0, 0, 0);
    *fd = -1;
}

/* Send what is queued. Returns 1 when nothing is left. */
static int flush(void) {
    while (outbox_at < outbox_length) {
        long n = sys(SYS_write, port, outbox + outbox_at, outbox_length - outbox_at, 0, 0);
        if (n == -EINTR) continue;
        if (n == -EAGAIN) return 0;
        if (n <= 0) die("write to the host", n);
        outbox_at += (u32)n;
    }
    outbox_at = outbox_length = 0;
    return 1;
}

static void refuse(void) {
    u32 n = (u32)length(last.text);
    memset(outbox + HEADER, 0, 8);
    outbox[HEADER] = (u8)last.stage;
    memcpy(outbox + HEADER + 4, &last.error, 4);
    memcpy(outbox + HEADER + 8, last.text, n);
    queue(REFUSED, 8 + n);
    running = 0, finished = 1;
}

static void report_end(void) {
    static char text[4096];
    u8 *p = outbox + HEADER;
    u64 cpu_us = 0, peak = 0;
    memset(p, 0, 32);
    p[0] = (u8)last.how, p[2] = last.kind != TOLD_END;
    memcpy(p + 4, &last.value, 4);
    if (is_guest) {
        if (read_file("/cg/exec/memory.events", text, sizeof text) > 0) p[1] = starved || number_of(text, "oom_kill ") > 0;
        if (read_file("/cg/exec/pids.events", text, sizeof text) > 0) p[3] = number_of(text, "max ") > 0;
        if (read_file("/cg/exec/cpu.stat", text, sizeof text) > 0) cpu_us = number_of(text, "usage_usec ");
        if (read_file("/cg/exec/memory.peak", text, sizeof text) > 0) peak = number_of(text, "");
    }
    memcpy(p + 8, &cpu_us, 8), memcpy(p + 16, &peak, 8), memcpy(p + 24, &last.elapsed_ns, 8);
    queue(EXIT, 32);
    running = 0, finished = 1;
}

/* Read one chunk of an output stream into the outbox. */
static void take_output(int *fd, u32 kind) {
    long n = sys(SYS_read, *fd, outbox + HEADER, MAX_PAYLOAD, 0, 0);
    if (n > 0) queue(kind, (u32)n);
    else if (n != -EAGAIN && n != -EINTR) close_end(fd);
}

/* Queue the next frame for the host, if there is one: what it must know first, then output, last the end. */
static void next_frame(short out, short err) {
    if (answer) queue((u32)answer, 0), answer = 0;
    else if (started == 1) {
        started = 2;
        queue(STARTED, 0);
    } else if (credit) {
        memcpy(outbox + HEADER, &credit, 4);
        queue(CREDIT, 4);
        credit = 0;
    } else if (err && exec.stderr >= 0) take_output(&exec.stderr, STDERR);
    else if (out && exec.stdout >= 0) take_output(&exec.stdout, STDOUT);
    else if (running && exec.init == 0 && exec.stdout < 0 && exec.stderr < 0) {
        if (last.kind == TOLD_REFUSED) refuse();
        else report_end();
    }
}

static void feed_command(void) {
    while (input_length) {
        u32 run = STDIN_WINDOW - input_at < input_length ? STDIN_WINDOW - input_at : input_length;
        long n = sys(SYS_write, exec.stdin, input + input_at, run, 0, 0);
        if (n == -EAGAIN) return;
        if (n == -EINTR) continue;
        if (n < 0) {
            close_end(&exec.stdin);
            input_length = 0, credit = STDIN_CLOSED;
            return;
        }
        input_at = (input_at + (u32)n) % STDIN_WINDOW, input_length -= (u32)n, credit += (u32)n;
    }
    if (input_ended) close_end(&exec.stdin);
}

static void take_input(const u8 *data, u32 n) {
    if (running && exec.stdin < 0) return;
    if (n > STDIN_WINDOW - input_length) die("more stdin than was allowed", -EPROTO);
    u32 end = (input_at + input_length) % STDIN_WINDOW, first = n < STDIN_WINDOW - end ? n : STDIN_WINDOW - end;
    memcpy(input + end, data, first);
    memcpy(input, data + first, n - first);
    input_length += n;
}

/* Mount the root before a command comes, for it takes a while. Its device may have been plugged in just now: then the
 * kernel looks for it on the bus. */
static void prepare(const u8 *tag, u32 n) {
    char name[40];
    if (!is_guest || running || finished || prepared || n >= sizeof name) die("no time to prepare", -EPROTO);
    memcpy(name, tag, n), name[n] = 0;
    for (int i = 0; i < PREPARE_TRIES; i++) {
        long e = mount(name, "/r", "virtiofs", MS_NOSUID | MS_NODEV, 0);
        if (e == 0) {
            prepared = 1, answer = PREPARED;
            return;
        }
        if (e != -EINVAL) die("mount the root", e);
        if (i % 100 == 0) {
            need(mount("sysfs", "/s", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0), "mount sysfs");
            write_file("/s/bus/pci/rescan", "1");
            sys(SYS_umount2, "/s", MNT_DETACH, 0, 0, 0);
        } else sleep_ms(2);
    }
    die("the root is not there", -ENOENT);
}

/* Leave zeros in the memory that nobody uses, so that whoever keeps a copy of it all need not keep that. */
static void settle(void) {
    u64 known[14] = {0}; /* struct sysinfo: free memory in bytes is the sixth word */
    sys(SYS_sysinfo, known, 0, 0, 0, 0);
    if (known[5] > 2 * UNTOUCHED) {
        u64 size = (known[5] - UNTOUCHED) & ~0x1ffffful;
        long at = sys6(SYS_mmap, 0, (long)size, 3 /* read, write */, 0x8022 /* private, anonymous, now */, -1, 0);
        if (at > 0) sys(SYS_munmap, at, size, 0, 0, 0);
    }
    answer = SETTLED;
}

/* Run what was requested, as a trial that nobody sees, in a copy of this process: a machine without KVM translates what
 * it runs for the first time, and what it reads of the root is then in its memory. */
static void rehearse(void) {
    if (running || finished) die("no time to rehearse", -EPROTO);
    long trial = need(sys(SYS_clone, SIGCHLD, 0, 0, 0, 0), "rehearse");
    if (trial == 0) {
        struct failure f = {0, 0, ""};
        rehearsing = 1;
        if (take_request() && start_command(&f)) {
            struct pollfd end = {exec.stdout, 0, 0};
            sys(SYS_close, exec.stdin, 0, 0, 0, 0);
            if (sys(SYS_poll, &end, 1, REHEARSAL_MS, 0, 0) != 1) sys(SYS_kill, exec.init, SIGKILL, 0, 0, 0);
            while (sys(SYS_wait4, exec.init, 0, 0, 0, 0) == -EINTR) {}
        }
        sys(SYS_exit, 0, 0, 0, 0, 0);
    }
    while (sys(SYS_wait4, trial, 0, 0, 0, 0) == -EINTR) {}
    request_length = 0, answer = REHEARSED;
}

static void begin(void) {
    struct failure f = {0, 0, ""};
    if (running || finished) die("a second request", -EPROTO);
    running = 1;
    if (!take_request()) failed(&f, STAGE_REQUEST, -EPROTO, "malformed request");
    else if (start_command(&f)) {
        if (is_guest) watch_pressure();
        return;
    }
    exec.init = 0;
    set_failure(&last, &f);
}

static void take_frame(u32 kind, u8 *payload, u32 n) {
    switch (kind) {
    case REQUEST:
        if (running || n > MAX_REQUEST - 1 - request_length) die("the request is too long or late", -E2BIG);
        memcpy(request_bytes + request_length, payload, n);
        request_length += n;
        return;
    case RUN: begin(); return;
    case STDIN: take_input(payload, n); return;
    case STDIN_END: input_ended = 1; return;
    case KILL:
        if (exec.init > 0) sys(SYS_kill, exec.init, SIGKILL, 0, 0, 0);
        return;
    case PREPARE: prepare(payload, n); return;
    case SETTLE: settle(); return;
    case REHEARSE: rehearse(); return;
    }
    die("a frame of unknown type", -EPROTO);
}

/* Read from the host and take the frames that are whole. */
static void listen(void) {
    long n = sys(SYS_read, port, inbox + inbox_length, sizeof inbox - inbox_length, 0, 0);
    if (n == -EAGAIN || n == -EINTR) return;
    if (n <= 0) die("the host is gone", n);
    inbox_length += (u32)n;
    u32 at = 0;
    while (inbox_length - at >= HEADER) {
        u32 size = u32_at(inbox + at + 4);
        if (size > MAX_PAYLOAD || inbox[at + 1] || inbox[at + 2] || inbox[at + 3]) die("a malformed frame", -EPROTO);
        if (inbox_length - at < HEADER + size) break;
        take_frame(inbox[at], inbox + at + HEADER, size);
        at += HEADER + size;
    }
    memmove(inbox, inbox + at, inbox_length - at);
    inbox_length -= at;
}

/* Hear from the init; at its end wait until every process of the command is dead. */
static void hear(void) {
    struct told t;
    long n = sys(SYS_read, exec.told, &t, sizeof t, 0, 0);
    if (n == sizeof t) {
        if (t.kind == TOLD_STARTED) started = 1;
        else t.text[sizeof t.text - 1] = 0, last = t;
    } else if (n != -EAGAIN && n != -EINTR) {
        close_end(&exec.told);
        while (sys(SYS_wait4, exec.init, 0, 0, 0, 0) == -EINTR) {}
        exec.init = 0;
        /* Unmounted, all that was written through mappings is on the host. */
        if (prepared && sys(SYS_umount2, "/r", 0, 0, 0, 0) < 0) sys(SYS_sync, 0, 0, 0, 0, 0);
    }
}

/* Each file this kernel remembers is an open one of the host's. Forget what nobody uses where there are too many; first
 * those without contents in memory, then, now and then, those too. */
static void forget_files(void) {
    static char text[128];
    static u64 looked_ns, dropped_ns, own; /* what this kernel knows of itself */
    u64 now = monotonic_ns();
    if (now - looked_ns < FORGET_MS * 1000000ul) return;
    looked_ns = now;
    for (const char *how = "2";; how = "3") {
        if (read_file("/p/sys/fs/inode-nr", text, sizeof text) <= 0) return;
        if (!own) own = number_of(text, "");
        if (number_of(text, "") <= own + request.inodes) return;
        if (*how == '3' && now - dropped_ns < NS) return;
        if (*how == '3') dropped_ns = now;
        write_file("/p/sys/vm/drop_caches", how);
        if (*how == '3') return;
    }
}

static void serve(void) {
    memcpy(outbox + HEADER, "fanout-agent", 12);
    u32 version = VERSION;
    memcpy(outbox + HEADER + 12, &version, 4);
    queue(READY, 16);
    for (;;) {
        int idle = flush();
        if (finished && idle && !outbox_length) break;
        short reads = idle ? POLLIN : 0;
        int wants_input = input_length || input_ended;
        struct pollfd fds[6] = {
            {port, (short)(POLLIN | (idle ? 0 : POLLOUT)), 0},
            {exec.told, POLLIN, 0},
            {wants_input ? exec.stdin : -1, POLLOUT, 0},
            {idle ? exec.stdout : -1, reads, 0},
            {idle ? exec.stderr : -1, reads, 0},
            {exec.init > 0 ? pressure : -1, POLLPRI, 0},
        };
        int urgent = idle && (answer || credit || started == 1 || (running && exec.init == 0));
        int watching = is_guest && exec.init > 0 && request.inodes;
        long n = sys(SYS_poll, fds, 6, urgent ? 0 : watching ? FORGET_MS : -1, 0, 0);
        if (n < 0 && n != -EINTR) die("poll", n);
        if (n < 0) continue;
        if (watching) forget_files();
        if (fds[0].revents & (POLLHUP | POLLERR)) die("the host is gone", 0);
        if (fds[0].revents & POLLIN) listen();
        if (fds[1].revents && exec.told >= 0) hear();
        if (fds[2].revents && exec.stdin >= 0) feed_command();
        if (fds[5].revents & POLLPRI && exec.init > 0 && is_starving()) starved = 1, sys(SYS_kill, exec.init, SIGKILL, 0, 0, 0);
        if (idle && !outbox_length) next_frame(fds[3].revents, fds[4].revents);
    }
    /* The host ends the machine when it has read the last frame; restarting now could overtake that frame. */
    struct pollfd gone = {port, POLLIN, 0};
    while (sys(SYS_poll, &gone, 1, LAST_WORDS_MS, 0, 0) > 0 && !(gone.revents & (POLLHUP | POLLERR)))
        if (sys(SYS_read, port, inbox, sizeof inbox, 0, 0) <= 0) break;
}

void start(void) {
    is_guest = sys(SYS_getpid, 0, 0, 0, 0, 0) == 1;
    if (is_guest) boot();
    else {
        sys(SYS_fcntl, port, F_SETFL, O_NONBLOCK, 0, 0);
        u64 ignore[4] = {1, 0x10000000, 0, 0}; /* SIG_IGN */
        sys(SYS_rt_sigaction, SIGPIPE, ignore, 0, 8, 0);
    }
    serve();
    if (is_guest) restart();
    sys(SYS_exit, 0, 0, 0, 0, 0);
}
