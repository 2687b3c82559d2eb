//! cryptsetup without device-mapper, for tests on hosts that have none.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use super::super::uuid::Uuid;
use super::cryptsetup::{ActiveMapping, Cryptsetup, CryptsetupCall, CryptsetupError, CryptsetupProgram};
use super::device::mapping_identifier;

/// The size of the file that stands for an open mapping.
const MAPPING_BYTES: u64 = 64 << 20;

/// Runs the real cryptsetup on disk images, but maps nothing: an open mapping is a sparse file, kept for each volume.
///
/// Headers, key slots and tokens are real. An authenticated volume needs the kernel, and can't be made.
#[derive(Debug)]
pub struct FileCryptsetup {
    program: CryptsetupProgram,
    mappings: PathBuf,
}

impl FileCryptsetup {
    /// Keeps the files of mappings in this directory.
    pub fn new(mappings: impl Into<PathBuf>) -> FileCryptsetup {
        FileCryptsetup { program: CryptsetupProgram::default(), mappings: mappings.into() }
    }

    /// Runs the program at this path, instead of the first cryptsetup in `PATH`.
    pub fn with_program(self, program: impl Into<PathBuf>) -> FileCryptsetup {
        FileCryptsetup { program: CryptsetupProgram::new(program), ..self }
    }

    fn open(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        let mut arguments = call.arguments.clone();
        let name = arguments.pop().unwrap_or_default();
        let header = argument_behind(&arguments, "--header").map(PathBuf::from).unwrap_or_default();
        arguments.insert(0, "--test-passphrase".into());
        self.program.run(&CryptsetupCall { arguments, input: call.input.clone(), ..*call })?;
        self.map(&header, &name).map_err(mapping_error)
    }

    fn map(&self, header: &Path, name: &OsStr) -> io::Result<()> {
        let bytes = fs::read(header)?;
        let uuid: Uuid = String::from_utf8_lossy(&bytes[168..168 + 36])
            .parse()
            .ok()
            .ok_or_else(|| io::Error::other("the header has no UUID"))?;
        let image = self.image_of(&uuid.to_string());
        fs::File::options().create(true).truncate(false).write(true).open(image)?.set_len(MAPPING_BYTES)?;
        fs::write(self.mappings.join(name), uuid.to_string())
    }

    fn close(&self, call: &CryptsetupCall<'_>) -> io::Result<()> {
        fs::remove_file(self.mappings.join(call.arguments.last().map_or(OsStr::new(""), OsString::as_os_str)))
    }

    fn image_of(&self, uuid: &str) -> PathBuf {
        self.mappings.join(format!("{uuid}.img"))
    }
}

impl Cryptsetup for FileCryptsetup {
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        let is_test = call.arguments.iter().any(|argument| argument == "--test-passphrase");
        match call.action {
            "open" if !is_test => self.open(call),
            "close" => self.close(call).map_err(mapping_error),
            "resize" => Ok(()),
            _ => self.program.run(call),
        }
    }

    fn run_long(
        &self,
        call: &CryptsetupCall<'_>,
        lock: BorrowedFd<'_>,
        report: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(), CryptsetupError> {
        self.program.run_long(call, lock, report)
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        match fs::read_to_string(self.mappings.join(name)) {
            Ok(uuid) => {
                let parsed: Uuid = uuid.parse().map_err(|()| io::Error::other("not a mapping"))?;
                let identifier = mapping_identifier(parsed, name);
                Ok(Some(ActiveMapping { device_path: self.image_of(&uuid), identifier }))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn mapping_error(source: io::Error) -> CryptsetupError {
    CryptsetupError::Start { program: "cryptsetup".into(), source }
}

fn argument_behind<'a>(arguments: &'a [OsString], name: &str) -> Option<&'a OsString> {
    arguments.iter().skip_while(|argument| *argument != name).nth(1)
}
