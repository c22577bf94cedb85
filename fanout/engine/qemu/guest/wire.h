/* Frames and the request: the guest's side of fanout/engine/qemu/protocol.py, which describes them. Knows nothing of
 * what is done with a request. The host is trusted, but a request that is cut or of another version is refused. */

enum { REQUEST = 1, RUN, STDIN, STDIN_END, KILL, PREPARE, SETTLE, REHEARSE };
enum { READY = 64, STARTED, STDOUT, STDERR, CREDIT, EXIT, REFUSED, PREPARED, SETTLED, REHEARSED };
enum { STAGE_REQUEST = 1, STAGE_ROOT, STAGE_DEVICES, STAGE_CWD, STAGE_LIMITS, STAGE_NETWORK, STAGE_PROCESS };
enum { ARG = 1, ENV, CWD, IDS, LIMITS, CLOCK, ENTROPY, CAPABILITIES, NETWORK, ROOT, TMPFS, INODES };

#define VERSION 4
#define HEADER 8
#define MAX_PAYLOAD (64 * 1024)
#define STDIN_WINDOW (256 * 1024)
#define STDIN_CLOSED 0xFFFFFFFFu
#define MAX_REQUEST (4 * 1024 * 1024)
#define MAX_WORDS (256 * 1024)
#define MAX_TMPFS 16
#define NS 1000000000ul

struct tmpfs { u32 mode; u64 size; char *path; };

static struct {
    char *argv[MAX_WORDS];
    char *env[MAX_WORDS];
    u32 args, envs, tmpfs_count;
    char *cwd, *root;
    u32 uid, gid;
    u64 memory, pids, cpu_us, files, user_namespaces, capabilities, clock_ns, inodes;
    struct tmpfs tmpfs[MAX_TMPFS];
    u8 *entropy, *network;
    u32 entropy_bytes;
} request;

static u8 request_bytes[MAX_REQUEST];
static u64 request_length;

static u32 u32_at(const u8 *p) { u32 n; memcpy(&n, p, 4); return n; }
static u64 u64_at(const u8 *p) { u64 n; memcpy(&n, p, 8); return n; }

static void header(u8 *at, u32 kind, u32 length) {
    memset(at, 0, HEADER);
    at[0] = (u8)kind;
    memcpy(at + 4, &length, 4);
}

/* Take one field. Returns 0 for one that is malformed or unknown. */
static int take_field(u32 tag, u8 *value, u32 n) {
    switch (tag) {
    case ARG:
        if (request.args + 1 >= MAX_WORDS) return 0;
        request.argv[request.args++] = (char *)value;
        return 1;
    case ENV:
        if (request.envs + 1 >= MAX_WORDS) return 0;
        request.env[request.envs++] = (char *)value;
        return 1;
    case CWD: request.cwd = (char *)value; return 1;
    case ROOT: request.root = (char *)value; return 1;
    case IDS:
        if (n != 8) return 0;
        request.uid = u32_at(value), request.gid = u32_at(value + 4);
        return 1;
    case LIMITS:
        if (n != 40) return 0;
        request.memory = u64_at(value), request.pids = u64_at(value + 8), request.cpu_us = u64_at(value + 16);
        request.files = u64_at(value + 24), request.user_namespaces = u64_at(value + 32);
        return 1;
    case CLOCK: request.clock_ns = n == 8 ? u64_at(value) : 0; return n == 8;
    case CAPABILITIES: request.capabilities = n == 8 ? u64_at(value) : 0; return n == 8;
    case ENTROPY: request.entropy = value, request.entropy_bytes = n; return n <= 512;
    case NETWORK: request.network = value; return n == 12;
    case INODES:
        if (n != 8) return 0;
        request.inodes = u64_at(value);
        return 1;
    case TMPFS:
        if (n < 13 || request.tmpfs_count == MAX_TMPFS) return 0;
        request.tmpfs[request.tmpfs_count].mode = u32_at(value);
        request.tmpfs[request.tmpfs_count].size = u64_at(value + 4);
        request.tmpfs[request.tmpfs_count++].path = (char *)value + 12;
        return value[12] == '/';
    }
    return 0;
}

/* Cut the request into its fields, each moved over its own head so that a NUL fits behind it. Returns 0 if malformed. */
static int take_request(void) {
    u64 at = 0;
    while (at < request_length) {
        if (request_length - at < 5) return 0;
        u8 *field = request_bytes + at;
        u32 tag = field[0], n = u32_at(field + 1);
        if (n > request_length - at - 5) return 0;
        memmove(field, field + 5, n);
        field[n] = 0;
        if (!take_field(tag, field, n)) return 0;
        at += 5 + (u64)n;
    }
    return request.args > 0 && request.cwd != 0;
}
