/* What the command sees and may do: its root, devices, limits, rights. Called in the process that becomes the init of
 * its namespaces, or before that in the agent. Knows nothing of frames; every step says where and why it failed. */

struct failure { int stage; int error; const char *text; };

static int failed(struct failure *f, int stage, long error, const char *text) {
    f->stage = stage, f->error = (int)-error, f->text = text;
    return 0;
}

#define must(stage, what, text) do { long e_ = (long)(what); if (e_ < 0) return failed(f, stage, e_, text); } while (0)

static long mount(const char *source, const char *at, const char *type, u64 flags, const char *options) {
    return sys(SYS_mount, source, at, type, flags, options);
}

static long mkdir(const char *path, u32 mode) {
    long e = sys(SYS_mkdir, path, mode, 0, 0, 0);
    return e == -EEXIST ? 0 : e;
}

/* Paths of the kernel's that its root user could write; capabilities alone do not keep them. */
static const char *const READ_ONLY[] = {"proc/sys", "proc/sysrq-trigger", "proc/irq", "proc/bus", "proc/fs", "proc/acpi",
                                        "proc/mtrr", "proc/scsi", 0};

static int make_proc(struct failure *f) {
    must(STAGE_ROOT, mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0), "mount proc");
    for (const char *const *path = READ_ONLY; *path; path++) {
        long e = mount(*path, *path, 0, MS_BIND, 0);
        if (e == -ENOENT) continue;
        must(STAGE_ROOT, e, *path);
        must(STAGE_ROOT, mount(0, *path, 0, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, 0), *path);
    }
    return 1;
}

static const struct { const char *path; u32 major, minor; } NODES[] = {
    {"dev/null", 1, 3}, {"dev/zero", 1, 5}, {"dev/full", 1, 7}, {"dev/random", 1, 8}, {"dev/urandom", 1, 9}, {"dev/tty", 5, 0},
    {0, 0, 0}};
static const char *const LINKS[][2] = {
    {"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"},
    {"/proc/self/fd/2", "dev/stderr"}, {"/proc/kcore", "dev/core"}, {"pts/ptmx", "dev/ptmx"}, {0, 0}};

static int make_devices(struct failure *f) {
    must(STAGE_DEVICES, mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k"), "mount dev");
    for (int i = 0; NODES[i].path; i++)
        must(STAGE_DEVICES, sys(SYS_mknod, NODES[i].path, S_IFCHR | 0666, NODES[i].major << 8 | NODES[i].minor, 0, 0), NODES[i].path);
    for (int i = 0; LINKS[i][0]; i++) must(STAGE_DEVICES, sys(SYS_symlink, LINKS[i][0], LINKS[i][1], 0, 0, 0), LINKS[i][1]);
    must(STAGE_DEVICES, mkdir("dev/shm", 01777), "dev/shm");
    must(STAGE_DEVICES, mkdir("dev/pts", 0755), "dev/pts");
    must(STAGE_DEVICES, mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"), "devpts");
    return 1;
}

static int make_tmpfs(struct failure *f) {
    for (u32 i = 0; i < request.tmpfs_count; i++) {
        struct tmpfs *each = &request.tmpfs[i];
        char options[64];
        put_number(put(put_number(put(options, "mode="), each->mode & 07777, 8), ",size="), each->size, 10);
        must(STAGE_DEVICES, mount("tmpfs", each->path + 1, "tmpfs", MS_NOSUID | MS_NODEV, options), each->path);
    }
    must(STAGE_DEVICES, mount(0, "dev", 0, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, 0), "make dev read-only");
    return 1;
}

static int prepared; /* the root is mounted already, by the agent */

/* Make the shared tree the root of this mount namespace, and leave nothing of the guest's own in reach. */
static int make_root(struct failure *f) {
    must(STAGE_ROOT, mount(0, "/", 0, MS_REC | MS_PRIVATE, 0), "make mounts private");
    if (!prepared) must(STAGE_ROOT, mount(request.root, "/r", "virtiofs", MS_NOSUID | MS_NODEV, 0), "mount the root over virtiofs");
    must(STAGE_ROOT, sys(SYS_chdir, "/r", 0, 0, 0, 0), "enter the root");
    if (!make_proc(f) || !make_devices(f) || !make_tmpfs(f)) return 0;
    must(STAGE_ROOT, sys(SYS_pivot_root, ".", ".", 0, 0, 0), "pivot_root");
    must(STAGE_ROOT, sys(SYS_umount2, ".", MNT_DETACH, 0, 0, 0), "leave the old root");
    must(STAGE_ROOT, sys(SYS_chdir, "/", 0, 0, 0, 0), "enter /");
    return 1;
}

static int drop_rights(struct failure *f) {
    u64 files[2] = {request.files, request.files}, core[2] = {0, 0};
    must(STAGE_LIMITS, sys(SYS_setrlimit, RLIMIT_CORE, core, 0, 0, 0), "limit core dumps");
    if (request.files) must(STAGE_LIMITS, sys(SYS_setrlimit, RLIMIT_NOFILE, files, 0, 0, 0), "limit open files");
    for (int i = 0; i < 64; i++)
        if (!(request.capabilities >> i & 1)) {
            long e = sys(SYS_prctl, PR_CAPBSET_DROP, i, 0, 0, 0);
            if (e == -EINVAL) break; /* past the last one */
            must(STAGE_PROCESS, e, "drop a capability");
        }
    if (request.root) {
        must(STAGE_PROCESS, sys(SYS_setgroups, 0, 0, 0, 0, 0), "setgroups");
        must(STAGE_PROCESS, sys(SYS_setresgid, request.gid, request.gid, request.gid, 0, 0), "setresgid");
        must(STAGE_PROCESS, sys(SYS_setresuid, request.uid, request.uid, request.uid, 0, 0), "setresuid");
    }
    u32 head[2] = {0x20080522, 0}, low = (u32)request.capabilities, high = (u32)(request.capabilities >> 32);
    if (request.uid) low = high = 0;
    u32 sets[6] = {low, low, 0, high, high, 0};
    must(STAGE_PROCESS, sys(SYS_capset, head, sets, 0, 0, 0), "capset");
    must(STAGE_PROCESS, sys(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges");
    return 1;
}

/* One program file; a text without an interpreter line is a shell script, as for execvp. */
static long execute_file(char *path) {
    long e = sys(SYS_execve, path, request.argv, request.env, 0, 0);
    if (e != -ENOEXEC || request.args + 1 >= MAX_WORDS) return e;
    for (u32 i = request.args; i > 0; i--) request.argv[i + 1] = request.argv[i];
    request.argv[0] = "/bin/sh", request.argv[1] = path;
    return sys(SYS_execve, "/bin/sh", request.argv, request.env, 0, 0);
}

/* Look the program up in PATH as execvp does and become it; return why not. */
static long execute(void) {
    static char candidate[8192];
    const char *path = "/usr/bin:/bin";
    char *name = request.argv[0];
    if (has_slash(name)) return execute_file(name);
    for (u32 i = 0; i < request.envs; i++)
        if (begins(request.env[i], "PATH=")) path = request.env[i] + 5;
    long worst = -ENOENT;
    if (length(name) > 255) return -ENOENT;
    for (;;) {
        u64 n = 0;
        while (path[n] && path[n] != ':') n++;
        if (n < 4096) {
            memcpy(candidate, path, n);
            if (n) candidate[n++] = '/';
            put(candidate + n, name);
            long e = execute_file(candidate);
            if (e == -EACCES) worst = e;
            else if (e != -ENOENT && e != -ENOTDIR) return e;
        }
        while (*path && *path != ':') path++;
        if (!*path++) return worst;
    }
}
