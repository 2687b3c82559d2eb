//! `cargo xtask kernel-test`: the tests that need a kernel of their own, in a guest.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use testbed::gotool::{self, GoTools};
use testbed::tools::{self, Tool};
use testbed::{Guest, bench, guest};

use crate::report::Report;
use crate::run::{self, CommandOutcome, LineFilter, Log};
use crate::setup;
use crate::test::binaries::{self, Executable};
use crate::test::launch::TestSelection;
use crate::test::sample::Sample;
use crate::test::{add_tests, events, list_ignored, requirement};
use crate::workspace;

pub(crate) mod need;

use need::GuestNeed;

const BUILD_WITHIN: Duration = Duration::from_secs(30 * 60);
/// Longer than a binary's tests take in a guest, which is ten times slower than this machine, beside other
/// work.
const BINARY_WITHIN: Duration = Duration::from_secs(30 * 60);
/// Where a bench in a guest leaves its rows.
const TARGET_IN_GUEST: &str = "/run/target";
/// What selects the cases of random tests.
pub(crate) const SEED: &str = "NODEKEEL_SEED";
const COPY_WITHIN: Duration = Duration::from_secs(120);
/// The programs of systemd's manager, which are in no search path; systemd before 255 lacks the second.
const SYSTEMD_PROGRAMS: [&str; 2] = ["/usr/lib/systemd/systemd", "/usr/lib/systemd/systemd-executor"];
const SYSTEMD_UNITS: &str = "/usr/lib/systemd/system";
/// The units that noded's unit depends on, by its text or as every service.
const SERVICE_TARGETS: [&str; 5] =
    ["sysinit.target", "basic.target", "shutdown.target", "network-online.target", "multi-user.target"];

/// The parts of a guest that are programs: those that Go has built, and those of Debian.
const GO_PROGRAMS: [(&str, GoTools); 3] =
    [("csi-sanity", gotool::CSI_SANITY), ("gvisor", gotool::CONTAINERD), ("gvisor", gotool::GVISOR)];
const DEBIAN_PROGRAMS: [(&str, Tool); 5] = [
    ("etcd", tools::ETCD),
    ("etcd", tools::ETCDCTL),
    ("containerd", tools::CONTAINERD),
    ("containerd", tools::CTR),
    ("tang", tools::TANGD),
];

/// The tests of one binary that need a guest.
#[derive(Clone, Debug)]
pub(crate) struct GuestJob {
    binary: Executable,
    need: GuestNeed,
    tests: Vec<String>,
}

impl GuestJob {
    /// `None` without tests.
    pub(crate) fn new(binary: Executable, tests: Vec<(GuestNeed, String)>) -> Option<Self> {
        let (needs, tests): (Vec<_>, Vec<_>) = tests.into_iter().unzip();
        Some(Self { binary, need: needs.into_iter().reduce(GuestNeed::and)?, tests })
    }

    /// Its name in reports.
    pub(crate) fn name(&self) -> String {
        format!("{} in a guest", self.binary.name())
    }

    /// Runs its tests in a guest; no others share it, so a guest that hangs or panics costs them alone.
    pub(crate) fn run(self, report: &mut Report) {
        report.log.headline(&self.name());
        match self.boot() {
            Ok(guest) => {
                let selection = TestSelection::Exactly(self.tests.clone());
                let command = self.command(&selection);
                run_tests(&guest, &self.name(), &command, (&selection, BINARY_WITHIN), report);
            }
            Err(error) => report.could_not_run(&self.name(), &format!("{error:#}")),
        }
    }

    fn command(&self, selection: &TestSelection) -> Command {
        let mut command = self.binary.command();
        command.args(selection.arguments()).envs([events::UNSTABLE]);
        // A guest has none of this process's variables, and a failed random test is repeated by its seed.
        command.envs(std::env::var_os(SEED).map(|seed| (SEED, seed)));
        command
    }

    fn boot(&self) -> Result<Guest> {
        add_binary(guest_builder(&self.need)?, &self.binary)?.boot()
    }
}

/// Builds the tests, and runs those that need a guest and whose `PACKAGE BINARY TEST` contains the filter.
pub(crate) fn run(filter: Option<&str>) -> Result<ExitCode> {
    let mut report = Report::new(Log::default());
    let jobs = build_jobs(filter, &mut report)?;
    if jobs.is_empty() && filter.is_some() {
        bail!("no test that needs a kernel has {:?} in its name", filter.unwrap_or_default());
    }
    jobs.into_iter().for_each(|job| job.run(&mut report));
    Ok(report.finish())
}

/// Runs each test that the filter means in a separate guest with a variable set, within its own time: a test that hangs
/// or fails says nothing of the others. Gives what all of them have written.
///
/// # Errors
/// Nothing can be built, or no guest boots.
pub(crate) fn run_counted(
    filter: &str,
    count: Option<&(&str, String)>,
    deadline: Duration,
    report: &mut Report,
) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for job in build_jobs(Some(filter), report)? {
        for test in &job.tests {
            let name = format!("{} {test}", job.name());
            let counted = count.map(|(name, count)| format!(" ({name}={count})")).unwrap_or_default();
            report.log.headline(&format!("{name}{counted}"));
            let selection = TestSelection::Exactly(vec![test.clone()]);
            let mut command = job.command(&selection);
            command.arg("--nocapture").envs(count.cloned());
            let guest = job.boot()?;
            lines.extend(run_tests(&guest, &name, &command, (&selection, deadline), report));
        }
    }
    Ok(lines)
}

fn build_jobs(filter: Option<&str>, report: &mut Report) -> Result<Vec<GuestJob>> {
    setup::install()?;
    // A filter that begins with a package's whole name selects that package alone.
    let first = filter.and_then(|filter| filter.split(' ').next());
    let mut packages = workspace::read_metadata()?.packages.into_iter().map(|package| package.name);
    let package: Vec<String> = packages.find(|name| Some(&**name) == first).into_iter().collect();
    report.log.headline("build");
    let built = binaries::build(&package, BUILD_WITHIN)?;
    report.add_check("build", built.elapsed, built.problem);
    let jobs = built.tests.into_iter().map(|binary| find_job(binary, filter, report));
    jobs.filter_map(Result::transpose).collect()
}

/// Runs tests in a guest, and gives what they have written. What became of a guest that was lost goes into the log.
fn run_tests(
    guest: &Guest,
    name: &str,
    command: &Command,
    (selection, deadline): (&TestSelection, Duration),
    report: &mut Report,
) -> Vec<String> {
    let (outcome, error) = run_in_guest(guest, command, (&report.log, events::show_event), deadline);
    add_tests(name, &outcome, selection, report);
    error.into_iter().for_each(|error| report.log.line(&format!("{error:#}")));
    outcome.lines
}

/// Runs a command in the guest. The error says what happened to the guest.
fn run_in_guest(
    guest: &Guest,
    command: &Command,
    (log, filter): (&Log, LineFilter),
    deadline: Duration,
) -> (CommandOutcome, Option<anyhow::Error>) {
    let start = Instant::now();
    let mut lines = Vec::new();
    let ended = guest.run_command(command, deadline, |line| {
        if let Some(text) = filter(line) {
            log.line(&text);
        }
        lines.push(line.to_owned());
    });
    let (problem, error) = match ended {
        Ok(0) => (None, None),
        Ok(code) => (Some(format!("exit status: {code}")), None),
        Err(error) => (Some(error.root_cause().to_string()), Some(error)),
    };
    (CommandOutcome { lines, elapsed: start.elapsed(), problem }, error)
}

/// A guest with what is needed, without the test's own programs.
fn guest_builder(need: &GuestNeed) -> Result<guest::GuestBuilder> {
    let mut builder = Guest::builder().with_memory(need.memory);
    for _ in 0..need.disks.count {
        builder = builder.with_disk(need.disks.bytes);
    }
    for _ in 0..need.disks_4kn.count {
        builder = builder.with_4kn_disk(need.disks_4kn.bytes);
    }
    if need.has("network") {
        builder = builder.with_network();
    }
    if need.has("tpm") {
        builder = builder.with_tpm();
    }
    if need.has("systemd") {
        builder = add_systemd(builder)?;
    }
    for (part, tools) in GO_PROGRAMS {
        if need.has(part) {
            let directory = tools.program_directory()?;
            for program in tools.programs {
                builder =
                    builder.add_file(Path::new("/usr/bin").join(program.file), directory.join(program.file));
            }
        }
    }
    for (part, tool) in DEBIAN_PROGRAMS {
        if need.has(part) {
            builder = builder.add_program(Path::new("/usr/bin").join(tool.name), tools::find_tool(tool)?);
        }
    }
    Ok(builder)
}

/// Adds this machine's systemd, with the units that a service needs and without those that set up a machine.
fn add_systemd(builder: guest::GuestBuilder) -> Result<guest::GuestBuilder> {
    let builder = builder.add_program("/usr/bin/systemctl", tools::find_tool(tools::SYSTEMCTL)?);
    let programs = SYSTEMD_PROGRAMS.into_iter().filter(|program| Path::new(program).exists());
    let builder = programs.fold(builder, |builder, program| builder.add_program(program, program));
    let units = SERVICE_TARGETS.map(|name| Path::new(SYSTEMD_UNITS).join(name));
    Ok(units.iter().fold(builder, |builder, unit| builder.add_file(unit, unit)))
}

/// Adds the test binary, the programs that it runs and its package's files, each at its path on this
/// machine: a test knows them by paths of the build.
fn add_binary(mut builder: guest::GuestBuilder, binary: &Executable) -> Result<guest::GuestBuilder> {
    builder = builder.add_program(&binary.path, &binary.path);
    for program in &binary.programs {
        builder = builder.add_program(program, program);
    }
    builder.add_directory(&binary.directory, &binary.directory)
}

/// Runs a bench in a guest, and copies the rows that it wrote there to those of other benches.
pub(crate) fn run_bench(binary: &Executable, need: &GuestNeed, deadline: Duration) -> Result<CommandOutcome> {
    let guest = add_binary(guest_builder(need)?, binary)?.boot()?;
    let mut command = binary.command();
    command.arg("--bench").env("CARGO_TARGET_DIR", TARGET_IN_GUEST);
    let (outcome, error) = run_in_guest(&guest, &command, (&Log::default(), run::show_line), deadline);
    if let Some(error) = error {
        return Err(error);
    }
    let rows = format!("{TARGET_IN_GUEST}/bench");
    let names = guest.command_output(Command::new("find").args([&rows, "-name", "*.json"]), COPY_WITHIN)?;
    fs::create_dir_all(bench::rows_directory()).context("create the directory of rows")?;
    for path in names.lines().map(Path::new) {
        let text = guest.command_output(Command::new("cat").arg(path), COPY_WITHIN)?;
        let copy = bench::rows_directory().join(path.file_name().unwrap_or_default());
        fs::write(&copy, text).with_context(|| format!("write {}", copy.display()))?;
    }
    Ok(outcome)
}

/// The tests of the binary that need a guest; a need that this command doesn't know is a failure.
fn find_job(binary: Executable, filter: Option<&str>, report: &mut Report) -> Result<Option<GuestJob>> {
    let is_selected =
        |test: &str| filter.is_none_or(|filter| format!("{} {test}", binary.name()).contains(filter));
    let (ignored, _) = Sample::All.choose(list_ignored(&binary)?);
    let groups = requirement::group_tests(ignored, run::is_root(), |_| false);
    let unmet = groups.unmet.into_iter().filter(|(test, why)| is_selected(test) && why.contains("kernel"));
    for (test, why) in unmet {
        report.could_not_run(&format!("{} {test}", binary.name()), &why);
    }
    // Without a filter, as in a test run, those of `cargo xtask soak` are left out.
    let soaks = if filter.is_some() { groups.guest_soak } else { Vec::new() };
    let selected = groups.guest.into_iter().chain(soaks).filter(|(_, test)| is_selected(test)).collect();
    Ok(GuestJob::new(binary, selected))
}
