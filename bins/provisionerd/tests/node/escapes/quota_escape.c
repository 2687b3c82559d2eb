/*
 * Tries to leave the quota of a volume, in each way in a separate process.
 *
 *     quota-escape OWN OTHER [WAY...]
 *
 * OWN and OTHER are empty directories of two volumes on one file system. It prints a line for each way:
 *
 *     WAY escaped COUNT    an audit finds COUNT files and directories in OWN that don't count for it
 *     WAY STEP ERRNO       the step failed
 *
 * What escaped stays; the rest is truncated. Without names it tries all ways but those that disturb the next one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1L << 20)
/* Of Linux 6.17; include/uapi/linux/fs.h and arch/x86/entry/syscalls/syscall_64.tbl. */
#define FILE_SETATTR 469
struct file_attributes { __u64 xflags; __u32 extsize, nextents, projid, cowextsize; };

static const char *way;
static int own, other;
static long limit;
/* System calls of the i386 ABI need addresses below 4 GiB, which those of static objects are. */
static struct fsxattr attributes;
static int flags;

static void fail(const char *step)
{
    int error = errno;
    syscall(SYS_umount2, "/dev/quota-escape", 2 /* MNT_DETACH */);
    for (int fd = 3; fd < 32; fd++)
        if (ftruncate(fd, 0) < 0)
            continue;
    printf("%s %s %s\n", way, step, strerrorname_np(error));
    exit(0);
}

static long check(const char *step, long result)
{
    if (result < 0)
        fail(step);
    return result;
}

static void report_escape(int count)
{
    printf("%s escaped %d\n", way, count);
    exit(0);
}

static int create_file(int directory, const char *name)
{
    return check("create", openat(directory, name, O_RDWR | O_CREAT | O_EXCL, 0666));
}

static int create_directory(int directory, const char *name)
{
    check("mkdir", mkdirat(directory, name, 0777));
    return check("open", openat(directory, name, O_RDONLY | O_DIRECTORY));
}

/* Writes blocks: those that are only allocated are not shared by a clone. */
static void write_blocks(int file, long bytes)
{
    static char block[MIB];
    memset(block, 7, sizeof block);
    for (long at = 0; at < bytes; at += MIB)
        check("write", pwrite(file, block, MIB, at));
    check("fsync", fsync(file));
}

static long allocated_bytes(int file)
{
    struct stat stat;
    check("stat", fstat(file, &stat));
    return stat.st_blocks * 512;
}

/* Puts more into a file than the volume may have. */
static void exceed_limit(int file)
{
    check("fallocate", fallocate(file, 0, 0, limit + limit / 2));
}

typedef long ioctl_function(int file, unsigned long command, void *argument);

static long plain_ioctl(int file, unsigned long command, void *argument)
{
    return syscall(SYS_ioctl, file, command, argument);
}

/* The kernel ignores these bits, a filter that compares all of them does not. */
static long ioctl_with_high_bits(int file, unsigned long command, void *argument)
{
    return syscall(SYS_ioctl, file, command | 1UL << 32, argument);
}

static long i386_ioctl(int file, unsigned long command, void *argument)
{
#ifdef __x86_64__
    int result = 54;
    __asm__ volatile("int $0x80"
                     : "+a"(result)
                     : "b"(file), "c"(command), "d"(argument)
                     : "memory", "r8", "r9", "r10", "r11");
#else
    int result = -ENOSYS;
#endif
    errno = -result;
    return result < 0 ? -1 : result;
}

/* Returns the former project. */
static unsigned set_project(ioctl_function *call, int file, unsigned project)
{
    check("FS_IOC_FSGETXATTR", ioctl(file, FS_IOC_FSGETXATTR, &attributes));
    unsigned former = attributes.fsx_projid;
    attributes.fsx_projid = project;
    check("ioctl", call(file, FS_IOC_FSSETXATTR, &attributes));
    return former;
}

static void leave_project(ioctl_function *call)
{
    int file = create_file(own, "file");
    set_project(call, file, 0);
    exceed_limit(file);
    report_escape(1);
}

static void clear_inheritance(ioctl_function *call)
{
    int directory = create_directory(own, "directory");
    check("FS_IOC_FSGETXATTR", ioctl(directory, FS_IOC_FSGETXATTR, &attributes));
    attributes.fsx_xflags &= ~FS_XFLAG_PROJINHERIT;
    check("ioctl", call(directory, FS_IOC_FSSETXATTR, &attributes));
    exceed_limit(create_file(directory, "file"));
    report_escape(2);
}

static void clear_flag(ioctl_function *call, unsigned long command)
{
    int directory = create_directory(own, "directory");
    check("FS_IOC_GETFLAGS", ioctl(directory, FS_IOC_GETFLAGS, &flags));
    flags &= ~FS_PROJINHERIT_FL;
    check("ioctl", call(directory, command, &flags));
    exceed_limit(create_file(directory, "file"));
    report_escape(2);
}

/* The file counts again, with more bytes than the limit allows. */
static void project_and_back(void)
{
    int file = create_file(own, "file");
    unsigned project = set_project(plain_ioctl, file, 0);
    exceed_limit(file);
    set_project(plain_ioctl, file, project);
    report_escape(0);
}

/* A file without a name, which a process has open for as long as the container exists. */
static void removed_file(void)
{
    int file = create_file(own, "file");
    check("unlinkat", unlinkat(own, "file", 0));
    set_project(plain_ioctl, file, 0);
    exceed_limit(file);
    if (check("fork", fork()) == 0) {
        for (int output = 0; output < 3; output++)
            close(output);
        pause();
    }
    report_escape(0);
}

static void project(void) { leave_project(plain_ioctl); }
static void project_high_bits(void) { leave_project(ioctl_with_high_bits); }
static void project_i386(void) { leave_project(i386_ioctl); }
static void inherit(void) { clear_inheritance(plain_ioctl); }
static void inherit_flags(void) { clear_flag(plain_ioctl, FS_IOC_SETFLAGS); }
static void inherit_flags_i386(void) { clear_flag(i386_ioctl, FS_IOC32_SETFLAGS); }

/* The file counts for the other volume. */
static void neighbour(void)
{
    int file = create_file(own, "file");
    check("FS_IOC_FSGETXATTR", ioctl(other, FS_IOC_FSGETXATTR, &attributes));
    set_project(plain_ioctl, file, attributes.fsx_projid);
    check("fallocate", fallocate(file, 0, 0, MIB / 16));
    report_escape(1);
}

static void file_setattr(void)
{
    int file = create_file(own, "file");
    struct file_attributes none = {0};
    check("file_setattr", syscall(FILE_SETATTR, own, "file", &none, sizeof none, 0));
    exceed_limit(file);
    report_escape(1);
}

/* In its volume the file counts, so nothing may have it anywhere else. */
static void finish(const char *step, long result)
{
    check(step, result);
    report_escape(1);
}

static void link_to(int directory, const char *name)
{
    create_file(own, "file");
    finish("linkat", linkat(own, "file", directory, name, 0));
}

static void link_to_other(void) { link_to(other, "file"); }
static void link_outside(void) { link_to(AT_FDCWD, "/quota-escape"); }

static void link_descriptor(void)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", create_file(own, "file"));
    finish("linkat", linkat(AT_FDCWD, path, other, "file", AT_SYMLINK_FOLLOW));
}

static void rename_directory(void)
{
    create_directory(own, "directory");
    finish("renameat", renameat(own, "directory", other, "directory"));
}

static void rename_file(void)
{
    create_file(own, "file");
    finish("renameat", renameat(own, "file", other, "file"));
}

static void rename_exchange(void)
{
    create_file(own, "file");
    create_file(other, "file");
    finish("renameat2", renameat2(own, "file", other, "file", RENAME_EXCHANGE));
}

static long clone_file(int from, int to, long bytes)
{
    (void)bytes;
    return ioctl(to, FICLONE, from);
}

static long copy_range(int from, int to, long bytes)
{
    off_t at = 0, position = 0;
    while (at < bytes)
        if (copy_file_range(from, &at, to, &position, bytes - at, 0) < 0)
            return -1;
    return 0;
}

/* Fills OWN beyond its limit with blocks that it shares with OTHER: the second copy must not fit. */
static void share_blocks(const char *step, long (*share)(int from, int to, long bytes))
{
    int from = create_file(other, "file");
    long bytes = limit / 4 * 3;
    write_blocks(from, bytes);
    int first = create_file(own, "first"), second = create_file(own, "second");
    check("first copy", share(from, first, bytes));
    errno = 0;
    long result = share(from, second, bytes);
    if (allocated_bytes(first) + allocated_bytes(second) <= limit)
        check(step, result < 0 || allocated_bytes(second) < bytes ? -1 : 0);
    report_escape(2);
}

static void reflink(void) { share_blocks("FICLONE", clone_file); }
static void copy(void) { share_blocks("copy_file_range", copy_range); }

/* Has io_uring perform one operation on a file in OWN, with a new name in OTHER. */
static int submit(unsigned char opcode)
{
    create_file(own, "file");
    struct io_uring_params params = {0};
    int ring = check("io_uring_setup", syscall(SYS_io_uring_setup, 1, &params));
    int access = PROT_READ | PROT_WRITE;
    size_t queue = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t results = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    char *sq = mmap(NULL, queue, access, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, results, access, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *entry = mmap(NULL, sizeof *entry, access, MAP_SHARED, ring, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || entry == MAP_FAILED)
        fail("mmap");
    *entry = (struct io_uring_sqe){
        .opcode = opcode, .fd = own, .len = other, .addr = (__u64) "file", .addr2 = (__u64) "file"};
    *(unsigned *)(sq + params.sq_off.array) = 0;
    __atomic_store_n((unsigned *)(sq + params.sq_off.tail), 1, __ATOMIC_RELEASE);
    check("io_uring_enter", syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0));
    int result = ((struct io_uring_cqe *)(cq + params.cq_off.cqes))->res;
    errno = result < 0 ? -result : 0;
    return result;
}

static void uring_link(void) { finish("linkat", submit(IORING_OP_LINKAT)); }
static void uring_rename(void) { finish("renameat", submit(IORING_OP_RENAMEAT)); }

/* A file system in a file that is larger than the volume may be. */
static void loop_mount(void)
{
    check("mknod", mknod("/dev/quota-escape-control", S_IFCHR | 0600, makedev(10, 237)));
    int control = check("open", open("/dev/quota-escape-control", O_RDWR));
    int number = check("LOOP_CTL_GET_FREE", ioctl(control, LOOP_CTL_GET_FREE));
    check("mknod", mknod("/dev/quota-escape-loop", S_IFBLK | 0600, makedev(7, number)));
    int device = check("open", open("/dev/quota-escape-loop", O_RDWR));
    int image = create_file(own, "image");
    check("ftruncate", ftruncate(image, 4 * limit));
    struct loop_config config = {.fd = image, .info.lo_flags = LO_FLAGS_AUTOCLEAR};
    check("LOOP_CONFIGURE", ioctl(device, LOOP_CONFIGURE, &config));
    check("mke2fs", system("mke2fs -F /dev/quota-escape-loop >/dev/null 2>&1") == 0 ? 0 : -1);
    check("mkdir", mkdir("/dev/quota-escape", 0700));
    check("mount", syscall(SYS_mount, "/dev/quota-escape-loop", "/dev/quota-escape", "ext2", 0, NULL));
    write_blocks(create_file(AT_FDCWD, "/dev/quota-escape/file"), limit + limit / 2);
    report_escape(0);
}

static const struct {
    const char *name;
    void (*attempt)(void);
    int only_if_named;
} WAYS[] = {
    {"project", project, 0},
    {"project-high-bits", project_high_bits, 0},
    {"project-i386", project_i386, 0},
    {"neighbour", neighbour, 0},
    {"removed-file", removed_file, 0},
    {"inherit", inherit, 0},
    {"inherit-flags", inherit_flags, 0},
    {"inherit-flags-i386", inherit_flags_i386, 0},
    {"file-setattr", file_setattr, 0},
    {"link", link_to_other, 0},
    {"link-descriptor", link_descriptor, 0},
    {"link-outside", link_outside, 0},
    {"rename", rename_file, 0},
    {"rename-directory", rename_directory, 0},
    {"rename-exchange", rename_exchange, 0},
    {"reflink", reflink, 0},
    {"copy", copy, 0},
    {"uring-link", uring_link, 0},
    {"uring-rename", uring_rename, 0},
    {"loop-mount", loop_mount, 0},
    {"project-and-back", project_and_back, 1},
};

static int is_wanted(size_t index, char **names)
{
    if (*names == NULL)
        return !WAYS[index].only_if_named;
    while (*names != NULL)
        if (strcmp(*names++, WAYS[index].name) == 0)
            return 1;
    return 0;
}

int main(int count, char **arguments)
{
    struct statvfs stat;
    if (count < 3 || statvfs(arguments[1], &stat) < 0)
        return perror("usage: quota-escape OWN OTHER [WAY...]"), 2;
    limit = stat.f_blocks * stat.f_frsize;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t index = 0; index < sizeof WAYS / sizeof *WAYS; index++) {
        way = WAYS[index].name;
        if (!is_wanted(index, arguments + 3))
            continue;
        pid_t child = fork();
        if (child == 0) {
            own = create_directory(open(arguments[1], O_RDONLY), way);
            other = create_directory(open(arguments[2], O_RDONLY), way);
            WAYS[index].attempt();
        }
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0)
            printf("%s child %d\n", way, status);
    }
    return 0;
}
