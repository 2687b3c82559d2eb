# Makes $1 anew: a bare Debian of this machine's release, with the toolchain and a clone of the checkout $2.
rm -rf "$1"
. /etc/os-release
debootstrap --variant=minbase "$VERSION_CODENAME" "$1"
# How this machine reaches the package registries. Links lead outside the chroot, so their targets are copied.
for each in resolv.conf hosts apt ssl; do
    cp -rL "/etc/$each" "$1/etc"
done
mkdir -p "$1/opt"
cp -r "$(rustc --print sysroot)" "$1/opt/rust"
git clone --quiet --no-hardlinks "$2" "$1/root/nodekeel"
