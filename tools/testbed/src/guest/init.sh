#!/bin/busybox sh
# The guest's first process, in the initramfs: loads the root's modules, mounts the root, and hands over to its init.
# The host sets these variables (unknown words of the kernel's command line become the environment):
#   NODEKEEL_MODULES    modules to load once the root is mounted, separated by commas
#   NODEKEEL_PROBE      set where the host only probes whether a guest boots this far
if [ -n "$NODEKEEL_PROBE" ]; then
    echo "nodekeel: user space was reached"
    busybox poweroff -f
fi
set -e
trap 'echo "nodekeel: the guest could not start"; busybox poweroff -f' EXIT
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do
    busybox insmod "$module"
done

# A disk is identified by its serial number, in whatever order the kernel found it.
disk() {
    for block in /sys/block/*; do
        if [ "$(busybox cat "$block/serial" 2>/dev/null)" = "$1" ]; then
            echo "/dev/${block##*/}"
            return
        fi
    done
    echo "nodekeel: no disk $1" >&2
    return 1
}

busybox mount -t tmpfs -o mode=0755 tmpfs /state
busybox mkdir /state/upper /state/work
busybox mount -t squashfs -o ro "$(disk root)" /image
busybox mount -t overlay -o lowerdir=/image,upperdir=/state/upper,workdir=/state/work overlay /root
busybox mount -t squashfs -o ro "$(disk modules)" /root/usr/lib/modules

# All disks of a kind, separated by colons.
disks() {
    found=
    number=0
    while device=$(disk "$1$number" 2>/dev/null); do
        found="${found:+$found:}$device"
        number=$((number + 1))
    done
    echo "$found"
}
NODEKEEL_GUEST_DISKS=$(disks disk)
NODEKEEL_GUEST_4KN_DISKS=$(disks 4kn)
export NODEKEEL_GUEST_DISKS NODEKEEL_GUEST_4KN_DISKS

for directory in proc sys dev; do
    busybox mount -o move "/$directory" "/root/$directory"
done
trap - EXIT
exec busybox switch_root /root /usr/lib/nodekeel/start
