"""The script that makes a Debian root of packages; it is root of namespaces of its own. See `debian`."""

BUILD = r"""
set -eu
umask 022
tree=$1 archives=$2 first=$3

# What dpkg itself runs on comes first, as plain files. Links before directories: packages hold paths of both kinds.
for name in bin sbin lib lib64; do
    mkdir -p "$tree/usr/$name"
    ln -s "usr/$name" "$tree/$name"
done
while read -r file; do
    dpkg-deb --fsys-tarfile "$archives/$file" |
        tar -x -p --numeric-owner --keep-directory-symlink -C "$tree"
done <"$first"
mkdir -p "$tree/var/lib/dpkg/info" "$tree/var/lib/dpkg/updates" "$tree/etc/dpkg/dpkg.cfg.d" "$tree/mnt"
: >"$tree/var/lib/dpkg/status"
cat >"$tree/etc/dpkg/dpkg.cfg.d/small" <<END
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
END

mount -t proc -o nosuid,nodev,noexec proc "$tree/proc"
mount -t tmpfs -o mode=755 tmpfs "$tree/dev"
for name in null zero full random urandom tty; do
    : >"$tree/dev/$name"
    mount --bind "/dev/$name" "$tree/dev/$name"
done
ln -s /proc/self/fd "$tree/dev/fd"
mkdir "$tree/dev/shm"
mount --bind "$archives" "$tree/mnt"
mount -t tmpfs tmpfs "$tree/tmp"
cp "$first" "$tree/tmp/first"

exec chroot "$tree" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true DEBCONF_NOWARNINGS=yes /bin/sh -euc '
printf "#!/bin/sh\nexit 101\n" >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
cd /mnt
dpkg="dpkg --force-depends,unsafe-io,confold"
# Accounts first: owners are names in packages.
$dpkg --install base-passwd_*.deb
$dpkg --install base-files_*.deb
$dpkg --install $(cat /tmp/first)
$dpkg --unpack *.deb
dpkg --force-unsafe-io --configure --pending
cd /
test -z "$(dpkg --audit)"
rm -f /usr/sbin/policy-rc.d /usr/lib/python3*/EXTERNALLY-MANAGED
rm -rf /usr/share/man/* /usr/share/info/* /usr/share/locale/* /var/cache/debconf/*-old /var/lib/dpkg/*-old
find /usr/share/doc -type f ! -name copyright -delete
find /usr/share/doc -type l -delete
find /usr/share/doc -type d -empty -delete
find /var/log -type f -delete
python3 -c "import venv"
'
"""
"""Arguments: the tree, an empty directory; the directory with the packages; a file with the names of those that every
Debian has, one a line. `python3` is among the packages.

A root made so is a world of its own, in which `pip install` may install: what guards a machine against that is taken
out.
"""
