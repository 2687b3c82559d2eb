//! A node's directories as types: declared once, placed in a directory, written to, read, and printed.
//!
//! `cargo run -p examples --example place_tree`

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::tree::{
    BrandNames, EtcdDir, IdentityDir, LayoutDir, LayoutEntry, LayoutFile, LayoutTarget, MountPoint, PkiDir,
};
use nodekeel_localstorage::volume::{self, DataVolume as _, ErasePolicy};
use nodekeel_localstorage::{Dir, OsFileStore, layout};

layout! {
    /// A custom system: a data volume, and a weather station.
    pub struct SystemRoot {
        /// Persistent data.
        pub data: MountPoint<DataVolume> = "data", 0o755;
        /// The directory of the station.
        pub station: WeatherStation = "{brand}-station", 0o750;
    }

    /// The data volume, composed of directories that nodekeel's crates declare.
    pub struct DataVolume {
        /// The node's member of the cluster's etcd.
        pub etcd: EtcdDir = "etcd", 0o700;
        /// The identity of the node.
        pub node: IdentityDir = "node", 0o700;
    }

    /// The weather station.
    pub struct WeatherStation {
        /// Its credentials for sensors.
        pub pki: PkiDir = "pki", 0o700;
        /// One file a day.
        pub readings: LayoutDir = "readings", 0o755;
        /// The list of sensors.
        pub sensors: LayoutFile = "sensors.json", 0o640;
    }
}

fn main() -> anyhow::Result<()> {
    let temporary = tempfile::tempdir()?;
    let names: BrandNames = "acme".parse()?;

    println!("# declared layout, before anything exists");
    print!("{}", WeatherStation::SHAPE.render_outline(&names));

    // Creating the layout creates the directories, and returns handles to read and write with.
    let site = LayoutTarget::new(Arc::new(OsFileStore::new(Dir::open(temporary.path())?)), temporary.path());
    let site = site.with_brand_names(names);
    let root: SystemRoot = site.create_layout()?;
    root.station.sensors.write(br#"["roof", "cellar"]"#)?;
    println!("# written and read: {}", String::from_utf8(root.station.sensors.read()?)?);
    println!("# an absent file is not an error: {:?}", root.station.pki.key.read_if_present()?);

    // Nothing can be written below the mount point before the volume is mounted.
    let volume = volume::DirectoryVolume::new(Dir::open(root.data.path())?);
    let data = root.data.create_layout_in(volume.mount_new(ErasePolicy::Nothing)?)?;
    data.node.roles.write(b"worker")?;

    println!("# created directories and files");
    print_tree(temporary.path(), 0)?;

    // A restart finds everything again, and does not create a new volume over the existing one.
    drop((root, data, volume));
    let root: SystemRoot = site.create_layout()?;
    let volume = volume::DirectoryVolume::new(Dir::open(root.data.path())?);
    if let Err(error) = volume.mount_new(ErasePolicy::Nothing) {
        let base = temporary.path().display().to_string();
        println!("# a second new volume is rejected: {}", error.to_string().replace(&base, ""));
    }
    let data = root.data.create_layout_in(volume.mount_existing()?)?;
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
