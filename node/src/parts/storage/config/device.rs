//! A data volume on a disk or partition: the rules between the keys of `[storage]`, and their meaning together.

use std::fmt;
use std::path::PathBuf;

use nodekeel_localstorage::tang::InvalidThumbprint;
use nodekeel_localstorage::volume::{
    ColdStart, KeyPolicy, PartitionQuery, PartitionType, PcrSelection, VolumeEncryption,
};

use super::{EncryptionMode, EspKind, SealKind, StorageConfig, VolumeKind};
use crate::config::check::{ConfigViolation, check_absolute_path, check_no_nul};
use crate::parts::storage::tang::{TangServer, TangUrl};

/// The data volume on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceConfig {
    pub(crate) location: DeviceLocation,
    /// `None` if it is not encrypted.
    pub(crate) encryption: Option<EncryptionConfig>,
    pub(crate) esp: EspLocation,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceLocation {
    Disk(PathBuf),
    Partition(PartitionQuery),
}

/// The encryption of a volume, and what opens it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EncryptionConfig {
    pub(crate) encryption: VolumeEncryption,
    pub(crate) keys: KeyPolicy,
    /// With split keys.
    pub(crate) cold_start: Option<ColdStart>,
    /// One at least with `cold_start = "tang"`, and none otherwise.
    pub(crate) tang: Vec<TangServer>,
    pub(crate) seal: SealConfig,
    pub(crate) discards: bool,
    pub(crate) wipe: bool,
    /// The disk or partition with the volume that this one is made from.
    pub(crate) copy_from: Option<PathBuf>,
}

/// The seal that keeps the node's half of the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SealConfig {
    File,
    Tpm(TpmConfig),
}

/// The conditions under which a TPM unseals a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TpmConfig {
    /// The registers whose values stay.
    pub(crate) pcrs: PcrSelection,
    pub(crate) signer: Option<SignerConfig>,
    /// The file with signatures; `None` for those of systemd. Also for a key that was sealed for a former signer.
    pub(crate) signature: Option<PathBuf>,
}

/// The registers whose values may be any that a key has signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SignerConfig {
    /// A PEM file.
    pub(crate) public_key: PathBuf,
    pub(crate) pcrs: PcrSelection,
}

/// The place of `esp/` of the data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EspLocation {
    Directory,
    Device(PathBuf),
    /// The EFI system partition of the disk on which the data partition is.
    SameDisk,
}

/// The register that has what the firmware knows of Secure Boot. *Source:* TCG PC Client Platform Firmware Profile, PCR 7.
const DEFAULT_PCR: u32 = 7;
/// The register that has a unified kernel image. *Source:* systemd-stub(7); UAPI group, Linux TPM PCR Registry.
const DEFAULT_SIGNED_PCR: u32 = 11;

impl StorageConfig {
    /// The data volume on a device; `None` for a directory.
    ///
    /// # Errors
    /// The first rule that the keys violate.
    pub(crate) fn device_config(&self) -> Result<Option<DeviceConfig>, ConfigViolation> {
        if self.kind == VolumeKind::Directory {
            let why = "is for kind = \"disk\" and \"partition\" only; remove it";
            return self.given_keys().first().map_or(Ok(None), |key| Err(violation(key, why)));
        }
        for path in
            [("device", &self.device), ("esp_device", &self.esp_device), ("copy_from", &self.copy_from)]
        {
            let (key, Some(path)) = path else { continue };
            check_absolute_path(&format!("storage.{key}"), path)?;
        }
        let location = self.location()?;
        let encryption = self.encryption()?;
        let esp = self.esp_location()?;
        Ok(Some(DeviceConfig { location, encryption, esp }))
    }

    fn location(&self) -> Result<DeviceLocation, ConfigViolation> {
        if self.kind == VolumeKind::Disk {
            self.check_absent(&["partition_type", "partition_label"], "is for kind = \"partition\" only")?;
            let hint = "is required by kind = \"disk\"; use a name that stays, as those in /dev/disk/by-id";
            return Ok(DeviceLocation::Disk(self.device.clone().ok_or_else(|| violation("device", hint))?));
        }
        check_no_nul("storage.partition_label", self.partition_label.as_deref())?;
        let parse = |text: &String| {
            text.parse().map_err(|error| {
                violation("partition_type", format!("{error}; lsblk -o PATH,PARTTYPE lists them"))
            })
        };
        let partition_type = self.partition_type.as_ref().map_or(Ok(PartitionType::NODEKEEL_DATA), parse)?;
        let (label, disk) = (self.partition_label.clone(), self.device.clone());
        Ok(DeviceLocation::Partition(PartitionQuery { partition_type, label, disk }))
    }

    fn encryption(&self) -> Result<Option<EncryptionConfig>, ConfigViolation> {
        let modes =
            "choose \"encrypted-and-authenticated\", \"encrypted\" or \"none\", since a volume keeps it";
        let encryption = match self.encryption.ok_or_else(|| {
            violation("encryption", format!("is required by kind = \"{}\"; {modes}", self.kind))
        })? {
            EncryptionMode::EncryptedAndAuthenticated => VolumeEncryption::EncryptedAndAuthenticated,
            EncryptionMode::Encrypted => VolumeEncryption::Encrypted,
            EncryptionMode::None => {
                return self.check_absent(KEY_KEYS, "is for an encrypted volume only").map(|()| None);
            }
        };
        match encryption {
            VolumeEncryption::EncryptedAndAuthenticated => self.check_absent(
                &["discards"],
                "is for encryption = \"encrypted\" only, as dm-integrity passes none",
            )?,
            _ => self.check_absent(&["wipe"], "is for encryption = \"encrypted-and-authenticated\" only")?,
        }
        let keys = self.keys.ok_or_else(|| {
            violation("keys", "is required by an encrypted volume; choose \"split\" or \"local\"")
        })?;
        // The operator decides how the node opens its volume after a power cut. No default would be safe for all.
        let cold_start = match keys {
            KeyPolicy::Split => Some(self.cold_start.ok_or_else(|| {
                violation(
                    "cold_start",
                    "is required by keys = \"split\"; choose \"operator\", \"tang\", \"local\" or \"peers\"",
                )
            })?),
            KeyPolicy::Local => {
                self.check_absent(&["cold_start"], "is for keys = \"split\" only").map(|()| None)?
            }
            _ => return Err(violation("keys", "is unknown; choose \"split\" or \"local\"")),
        };
        let (discards, wipe) = (self.discards.unwrap_or(false), self.wipe.unwrap_or(true));
        let (tang, seal) = (self.tang_servers(cold_start)?, self.seal_config()?);
        let copy_from = self.copy_from.clone();
        Ok(Some(EncryptionConfig { encryption, keys, cold_start, tang, seal, discards, wipe, copy_from }))
    }

    fn tang_servers(&self, cold_start: Option<ColdStart>) -> Result<Vec<TangServer>, ConfigViolation> {
        if cold_start != Some(ColdStart::Tang) {
            return self.check_absent(&["tang"], "is for cold_start = \"tang\" only").map(|()| Vec::new());
        }
        let given = self.tang.as_deref().unwrap_or_default();
        if given.is_empty() || given.len() > MAX_TANG_SERVERS {
            let why = "has to name one server, or up to 8, of which one is enough: \
                       tang = [{ url = \"http://HOST\", thumbprint = \"…\" }], as tang-show-keys prints it on the server";
            return Err(violation("tang", why));
        }
        let mut servers = Vec::<TangServer>::new();
        for config in given {
            let url: TangUrl = config.url.parse().map_err(|error| violation("tang.url", error))?;
            let signer = config.thumbprint.parse();
            let signer =
                signer.map_err(|error: InvalidThumbprint| violation("tang.thumbprint", error.to_string()))?;
            if servers.iter().any(|server| server.url == url) {
                return Err(violation("tang.url", format!("\"{url}\" is there twice; remove one")));
            }
            servers.push(TangServer { url, signer });
        }
        Ok(servers)
    }

    fn seal_config(&self) -> Result<SealConfig, ConfigViolation> {
        if self.seal != Some(SealKind::Tpm) {
            return self.check_absent(TPM_KEYS, "is for seal = \"tpm\" only").map(|()| SealConfig::File);
        }
        for path in [("tpm_public_key", &self.tpm_public_key), ("tpm_signature", &self.tpm_signature)] {
            let (key, Some(path)) = path else { continue };
            check_absolute_path(&format!("storage.{key}"), path)?;
        }
        let pcrs = select_pcrs("tpm_pcrs", self.tpm_pcrs.as_deref(), DEFAULT_PCR)?;
        let signer = match self.tpm_public_key.clone() {
            None => {
                self.check_absent(&["tpm_public_key_pcrs"], "is for a tpm_public_key only").map(|()| None)?
            }
            Some(public_key) => {
                let given = self.tpm_public_key_pcrs.as_deref();
                let pcrs = select_pcrs("tpm_public_key_pcrs", given, DEFAULT_SIGNED_PCR)?;
                if pcrs.is_empty() {
                    return Err(violation(
                        "tpm_public_key_pcrs",
                        "has to name a register; remove it for [11]",
                    ));
                }
                Some(SignerConfig { public_key, pcrs })
            }
        };
        Ok(SealConfig::Tpm(TpmConfig { pcrs, signer, signature: self.tpm_signature.clone() }))
    }

    fn esp_location(&self) -> Result<EspLocation, ConfigViolation> {
        match (self.esp, &self.esp_device) {
            (EspKind::Directory, _) => self
                .check_absent(&["esp_device"], "is for esp = \"partition\" only")
                .map(|()| EspLocation::Directory),
            (EspKind::Partition, Some(device)) => Ok(EspLocation::Device(device.clone())),
            // The new disk has no records of the node.
            (EspKind::Partition, None) if self.copy_from.is_some() => Err(violation(
                "esp_device",
                "is required by esp = \"partition\" with copy_from; name the partition that the node has used until now",
            )),
            (EspKind::Partition, None) if self.kind == VolumeKind::Partition => Ok(EspLocation::SameDisk),
            (EspKind::Partition, None) => Err(violation(
                "esp_device",
                "is required by esp = \"partition\" with kind = \"disk\"; name the partition",
            )),
        }
    }

    /// Rejects keys that have no effect, since the operator expects one.
    fn check_absent(&self, keys: &[&str], why: &str) -> Result<(), ConfigViolation> {
        match self.given_keys().into_iter().find(|given| keys.contains(given)) {
            Some(key) => Err(violation(key, format!("{why}; remove it"))),
            None => Ok(()),
        }
    }

    fn given_keys(&self) -> Vec<&'static str> {
        let all = [
            ("device", self.device.is_some()),
            ("partition_type", self.partition_type.is_some()),
            ("partition_label", self.partition_label.is_some()),
            ("encryption", self.encryption.is_some()),
            ("keys", self.keys.is_some()),
            ("cold_start", self.cold_start.is_some()),
            ("tang", self.tang.is_some()),
            ("seal", self.seal.is_some()),
            ("tpm_pcrs", self.tpm_pcrs.is_some()),
            ("tpm_public_key", self.tpm_public_key.is_some()),
            ("tpm_public_key_pcrs", self.tpm_public_key_pcrs.is_some()),
            ("tpm_signature", self.tpm_signature.is_some()),
            ("esp", self.esp != EspKind::default()),
            ("esp_device", self.esp_device.is_some()),
            ("discards", self.discards.is_some()),
            ("wipe", self.wipe.is_some()),
            ("copy_from", self.copy_from.is_some()),
        ];
        all.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key).collect()
    }
}

/// Each is asked at each start, and bound to by each change of the keys.
const MAX_TANG_SERVERS: usize = 8;

const TPM_KEYS: &[&str] = &["tpm_pcrs", "tpm_public_key", "tpm_public_key_pcrs", "tpm_signature"];

const KEY_KEYS: &[&str] = &[
    "keys",
    "cold_start",
    "tang",
    "seal",
    "tpm_pcrs",
    "tpm_public_key",
    "tpm_public_key_pcrs",
    "tpm_signature",
    "discards",
    "wipe",
    "copy_from",
];

fn select_pcrs(key: &str, given: Option<&[u32]>, default: u32) -> Result<PcrSelection, ConfigViolation> {
    let numbers = given.unwrap_or(std::slice::from_ref(&default)).iter().copied();
    PcrSelection::try_new(numbers).map_err(|error| violation(key, error.to_string()))
}

fn violation(key: &str, message: impl Into<String>) -> ConfigViolation {
    ConfigViolation::new(format!("storage.{key}"), message)
}

/// As the end of a sentence about the volume.
impl fmt::Display for DeviceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(disk) => write!(f, "on disk {}", disk.display()),
            Self::Partition(query) => {
                write!(f, "on the partition with type {}", query.partition_type)?;
                query.label.as_ref().map_or(Ok(()), |label| write!(f, " and label {label:?}"))?;
                query.disk.as_ref().map_or(Ok(()), |disk| write!(f, " of disk {}", disk.display()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Option<DeviceConfig>, String> {
        let config: StorageConfig = toml::from_str(keys).map_err(|error| error.to_string())?;
        config.device_config().map_err(|violation| violation.to_string())
    }

    #[test]
    fn each_kind_has_its_keys_and_its_defaults() {
        assert_eq!(parse(""), Ok(None));
        let none = parse("kind = \"disk\"\ndevice = \"/dev/sdb\"\nencryption = \"none\"").expect("valid");
        let expected = DeviceConfig {
            location: DeviceLocation::Disk("/dev/sdb".into()),
            encryption: None,
            esp: EspLocation::Directory,
        };
        assert_eq!(none, Some(expected));
        let split =
            "encryption = \"encrypted-and-authenticated\"\nkeys = \"split\"\ncold_start = \"operator\"\n";
        let partition = parse(&format!("kind = \"partition\"\nesp = \"partition\"\n{split}")).expect("valid");
        let partition = partition.expect("a device");
        let query = PartitionQuery { partition_type: PartitionType::NODEKEEL_DATA, label: None, disk: None };
        let location = DeviceLocation::Partition(query);
        assert_eq!((partition.location, partition.esp), (location, EspLocation::SameDisk));
        let encryption = EncryptionConfig {
            encryption: VolumeEncryption::EncryptedAndAuthenticated,
            keys: KeyPolicy::Split,
            cold_start: Some(ColdStart::Operator),
            tang: Vec::new(),
            seal: SealConfig::File,
            discards: false,
            wipe: true,
            copy_from: None,
        };
        assert_eq!(partition.encryption, Some(encryption));
    }

    const THUMBPRINT: &str = "2l_uvjJ7-agJEqReaYhUuKMTRjlvZ6i6XVwdI1NHoYY";

    /// A volume with these servers and their thumbprints.
    fn tang(servers: &[(&str, &str)]) -> String {
        let tables = servers
            .iter()
            .map(|(url, thumbprint)| format!("{{ url = {url:?}, thumbprint = {thumbprint:?} }}"));
        format!(
            "kind = \"disk\"\ndevice = \"/dev/sdb\"\nencryption = \"encrypted\"\nkeys = \"split\"\ncold_start = \"tang\"\n\
             tang = [{}]\n",
            tables.collect::<Vec<_>>().join(", ")
        )
    }

    #[test]
    fn tang_servers_have_a_url_and_the_thumbprint_of_the_key_that_signs_for_them() {
        let config =
            parse(&tang(&[("http://one:8080", THUMBPRINT), ("http://two", THUMBPRINT)])).expect("valid");
        let encryption = config.and_then(|config| config.encryption).expect("encrypted");
        let servers: Vec<_> = encryption.tang.iter().map(|server| server.url.to_string()).collect();
        assert_eq!(
            (encryption.cold_start, servers),
            (Some(ColdStart::Tang), vec!["http://one:8080".into(), "http://two".into()])
        );
    }

    #[test]
    fn a_tpm_binds_to_secure_boot_and_a_signer_to_the_kernel() {
        let seal = |keys: &str| {
            let disk =
                "kind = \"disk\"\ndevice = \"/dev/sdb\"\nencryption = \"encrypted\"\nkeys = \"local\"\n";
            let config = parse(&format!("{disk}seal = \"tpm\"\n{keys}")).expect("valid");
            config.and_then(|config| config.encryption).expect("encrypted").seal
        };
        let select = |number| PcrSelection::try_new([number]).expect("a PCR");
        let unsigned = TpmConfig { pcrs: select(7), signer: None, signature: None };
        assert_eq!(seal(""), SealConfig::Tpm(unsigned.clone()));
        let signer = SignerConfig { public_key: "/key.pem".into(), pcrs: select(11) };
        let signed = TpmConfig { signer: Some(signer), ..unsigned };
        assert_eq!(seal("tpm_public_key = \"/key.pem\""), SealConfig::Tpm(signed));
    }

    #[test]
    fn a_key_that_is_missing_or_has_no_effect_is_named_with_what_to_do() {
        let disk = "kind = \"disk\"\ndevice = \"/dev/sdb\"\n";
        let none = "encryption = \"none\"\n";
        let encrypted = "encryption = \"encrypted\"\n";
        let authenticated = "encryption = \"encrypted-and-authenticated\"\n";
        for (keys, says) in [
            (
                "device = \"/dev/sdb\"".to_owned(),
                "storage.device: is for kind = \"disk\" and \"partition\" only; remove it",
            ),
            ("wipe = true".to_owned(), "storage.wipe: is for kind = \"disk\""),
            (
                "kind = \"disk\"".to_owned(),
                "storage.device: is required by kind = \"disk\"; use a name that stays",
            ),
            ("kind = \"disk\"\ndevice = \"sdb\"".to_owned(), "storage.device: \"sdb\" is not absolute"),
            (
                format!("{disk}partition_label = \"a\"\n{none}"),
                "storage.partition_label: is for kind = \"partition\" only",
            ),
            (
                "kind = \"partition\"\npartition_type = \"esp\"".to_owned(),
                "storage.partition_type: can't parse partition",
            ),
            (disk.to_owned(), "storage.encryption: is required by kind = \"disk\"; choose"),
            (
                format!("{disk}{none}keys = \"local\""),
                "storage.keys: is for an encrypted volume only; remove it",
            ),
            (format!("{disk}{encrypted}"), "storage.keys: is required by an encrypted volume; choose"),
            (
                format!("{disk}{encrypted}keys = \"split\""),
                "storage.cold_start: is required by keys = \"split\"; choose",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\ncold_start = \"local\""),
                "storage.cold_start: is for keys = \"split\"",
            ),
            (
                format!("{disk}{encrypted}keys = \"split\"\ncold_start = \"operator\"\ntang = []"),
                "storage.tang: is for cold_start = \"tang\" only; remove it",
            ),
            (
                format!("{disk}{encrypted}keys = \"split\"\ncold_start = \"tang\""),
                "storage.tang: has to name one server, or up to 8",
            ),
            (
                tang(&[("https://tang", THUMBPRINT)]),
                "storage.tang.url: \"https://tang\" has TLS, which the protocol of Tang does not need; write http://HOST",
            ),
            (
                tang(&[("http://tang", "SHA1")]),
                "storage.tang.thumbprint: invalid thumbprint \"SHA1\": SHA-256",
            ),
            (
                tang(&[("http://tang", THUMBPRINT), ("http://tang/", THUMBPRINT)]),
                "storage.tang.url: \"http://tang\" is there twice",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\nwipe = false"),
                "storage.wipe: is for encryption = \"encrypted-and-",
            ),
            (
                format!("{disk}{authenticated}keys = \"local\"\ndiscards = true"),
                "storage.discards: is for encryption = \"encrypted\"",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\ntpm_pcrs = [7]"),
                "storage.tpm_pcrs: is for seal = \"tpm\" only",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\nseal = \"tpm\"\ntpm_pcrs = [99]"),
                "storage.tpm_pcrs: ",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\ntpm_signature = \"/run/a.json\""),
                "storage.tpm_signature: is for seal = \"tpm\" only",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\nseal = \"tpm\"\ntpm_public_key_pcrs = [11]"),
                "storage.tpm_public_key_pcrs: is for a tpm_public_key only",
            ),
            (
                format!("{disk}{encrypted}keys = \"local\"\nseal = \"tpm\"\ntpm_public_key = \"key.pem\""),
                "storage.tpm_public_key: \"key.pem\" is not absolute",
            ),
            (
                format!(
                    "{disk}{encrypted}keys = \"local\"\nseal = \"tpm\"\ntpm_public_key = \"/k.pem\"\ntpm_public_key_pcrs = []"
                ),
                "storage.tpm_public_key_pcrs: has to name a register",
            ),
            (
                format!("{disk}{none}esp_device = \"/dev/sda1\""),
                "storage.esp_device: is for esp = \"partition\" only",
            ),
            (
                format!("{disk}{none}esp = \"partition\""),
                "storage.esp_device: is required by esp = \"partition\" with kind",
            ),
        ] {
            let error = parse(&keys).expect_err("a violation");
            assert!(error.starts_with(says), "{keys}\n is: {error}\nnot: {says}");
        }
    }
}
