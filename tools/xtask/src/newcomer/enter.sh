# Runs the command $2 in the checkout of the chroot $1. Its mounts are in a private namespace, and end with it; runc's
# pivot_root and mountinfo need / to be a mount.
export DEBIAN_FRONTEND=noninteractive
exec unshare --mount --propagation private sh -euc '
    mount --bind "$1" "$1"
    for each in proc sys dev; do mount --rbind "/$each" "$1/$each"; done
    cd "$1"
    pivot_root . mnt
    exec chroot . /bin/sh -ec "
        umount -l /mnt
        export PATH=/opt/rust/bin:\$PATH HOME=/root
        cd /root/nodekeel
        $2"
' sh "$1" "$2"
