//! A node's directories as types: declared once, placed in a directory, written to, read, and printed.
//!
//! `cargo run -p examples --example place_tree`

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::tree::{Data, Directory, File, MountPoint, Names, Node, Pki, Site};
use nodekeel_localstorage::volume::{self, DataVolume as _, Erase};
use nodekeel_localstorage::{Dir, OsPlacement, layout};

layout! {
    /// A system of one's own: it keeps nodekeel's data partition, and adds a weather station.
    pub struct Root {
        /// What lasts, where nodekeel's own services look for it.
        pub data: MountPoint<Data> = "data", 0o755;
        /// Where the sensors report to.
        pub station: Station = "{brand}-station", 0o750;
    }

    /// The weather station.
    pub struct Station {
        /// By which sensors know it.
        pub pki: Pki = "pki", 0o700;
        /// One file a day.
        pub readings: Directory = "readings", 0o755;
        /// Which sensors there are.
        pub sensors: File = "sensors.json", 0o640;
    }
}

fn main() -> anyhow::Result<()> {
    let temporary = tempfile::tempdir()?;
    let names: Names = "acme".parse()?;

    println!("# what is declared, before anything exists");
    print!("{}", Station::SHAPE.outline(&names));

    // Placing makes the directories. Only then are there handles to read and write with.
    let site = Site::new(Arc::new(OsPlacement::new(Dir::open(temporary.path())?)), temporary.path());
    let site = site.with_names(names);
    let root: Root = site.place()?;
    root.station.sensors.write(br#"["roof", "cellar"]"#)?;
    println!("# what is written is read: {}", String::from_utf8(root.station.sensors.read()?)?);
    println!(
        "# what is not there is absent, which is no error: {:?}",
        root.station.pki.key.read_if_present()?
    );

    // Nothing can be written below the mount point before the volume is there.
    let volume = volume::Directory::new(Dir::open(root.data.path())?);
    let data = root.data.enter(volume.mount_new(Erase::Nothing)?)?;
    data.node.roles.write(b"worker")?;

    println!("# what is there now");
    print_tree(temporary.path(), 0)?;

    // A restart: everything is found again, and a new volume is not made over the old one.
    drop((root, data, volume));
    let root: Root = site.place()?;
    let volume = volume::Directory::new(Dir::open(root.data.path())?);
    if let Err(refused) = volume.mount_new(Erase::Nothing) {
        let place = temporary.path().display().to_string();
        println!("# a second new volume: {}", refused.to_string().replace(&place, ""));
    }
    let data = root.data.enter(volume.mount_existing()?)?;
    println!("# after a restart the node's role is {}", String::from_utf8(data.node.roles.read()?)?);
    Ok(())
}

fn print_tree(directory: &Path, depth: usize) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;

    let mut entries: Vec<_> = std::fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let metadata = entry.metadata()?;
        let sign = if metadata.is_dir() { "/" } else { "" };
        let mode = metadata.permissions().mode() & 0o7777;
        println!("{mode:04o} {:indent$}{}{sign}", "", entry.file_name().display(), indent = 2 * depth);
        if metadata.is_dir() {
            print_tree(&entry.path(), depth + 1)?;
        }
    }
    Ok(())
}
