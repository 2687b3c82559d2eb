//! Kubernetes' end-to-end tests of a CSI driver (`External.Storage`), against the image of provisionerd in a
//! cluster of one node.
//!
//! A process runs each spec. The results are in `tmp/external-storage.json` of the target directory, so that an
//! interrupted run goes on where it ended; another image, or a removed file, starts from the beginning. A
//! failed spec runs again. `NODEKEEL_EXTERNAL_STORAGE` limits a run to the specs whose names contain it; `all`
//! does not.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use testbed::guest::GuestBuilder;
use testbed::{BUSYBOX_IMAGE, ContainerImage, Kube, ScratchDir, command_output, gotool};

use crate::cluster::{DRIVER, TIMEOUT, TestCluster, image_file, with_cluster_and};
use crate::disk::VolumeFileSystem;

const FILTER: &str = "NODEKEEL_EXTERNAL_STORAGE";
const FOCUS: &str = r"External.Storage";
const AGNHOST_AT: &str = "/usr/lib/agnhost.tar";
const AGNHOST_IMAGE: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";
/// Further names of busybox: those of the suite's pods.
const BUSYBOX_ALIASES: [&str; 3] = [
    "registry.k8s.io/e2e-test-images/busybox:1.36.1-1",
    "registry.k8s.io/e2e-test-images/busybox:1.37.0-1",
    "registry.k8s.io/pause:3.10.2",
];

/// How a spec has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
enum SpecResult {
    Passed,
    Skipped { reason: String },
    Failed { reason: String },
}

/// The results of one image's specs, by their names.
#[derive(Debug, Default, Serialize, Deserialize)]
struct SpecResults {
    image: String,
    specs: BTreeMap<String, SpecResult>,
}

#[test]
#[ignore = "soak"]
fn the_end_to_end_suite_of_csi_drivers_passes() {
    let add_images = |guest: GuestBuilder, scratch: &ScratchDir| {
        let archive = scratch.path().join("agnhost.tar");
        let program = gotool::KUBERNETES_E2E.program_path("agnhost")?;
        // Its pods run shell scripts, too.
        let image = ContainerImage::busybox()?.with_name(AGNHOST_IMAGE).add_file("agnhost", program);
        image.with_entrypoint(["/agnhost"]).with_command(["pause"]).write_archive(&archive)?;
        Ok(guest.with_memory(3 << 30).add_file(AGNHOST_AT, archive))
    };
    with_cluster_and(VolumeFileSystem::Xfs, add_images, |cluster| {
        import_images(cluster)?;
        run_suite(&cluster.kube)
    });
}

fn import_images(cluster: &mut TestCluster) -> Result<()> {
    let ctr = |arguments: &[&str]| {
        let mut command = Command::new("ctr");
        command.args(["--namespace", "k8s.io", "images"]).args(arguments);
        cluster.node.guest().command_output(&command, TIMEOUT).map(drop)
    };
    ctr(&["import", AGNHOST_AT])?;
    BUSYBOX_ALIASES.iter().try_for_each(|alias| ctr(&["tag", BUSYBOX_IMAGE, alias]))?;
    cluster.times.log_step("images of the suite imported");
    Ok(())
}

fn run_suite(kube: &Kube) -> Result<()> {
    let scratch = ScratchDir::new()?;
    let suite = Suite::new(kube, scratch.path())?;
    let filter = std::env::var(FILTER).unwrap_or_else(|_| "all".into());
    let mut specs = suite.list_specs()?;
    specs.retain(|spec| filter == "all" || spec.contains(&filter));
    ensure!(!specs.is_empty(), "no spec contains {filter:?}, the value of {FILTER}");
    let mut results = SpecResults::load()?;
    for (number, spec) in specs.iter().enumerate() {
        if matches!(results.specs.get(spec), Some(SpecResult::Passed | SpecResult::Skipped { .. })) {
            continue;
        }
        let start = Instant::now();
        let result = suite.run_spec(spec)?;
        let word = match &result {
            SpecResult::Passed => "passed".to_owned(),
            SpecResult::Skipped { reason } => format!("skipped: {reason}"),
            SpecResult::Failed { reason } => format!("FAILED: {reason}"),
        };
        let seconds = start.elapsed().as_secs();
        println!("    [{} of {}] {spec}: {word} ({seconds} s)", number + 1, specs.len());
        results.specs.insert(spec.clone(), result);
        results.save()?;
    }
    results.specs.retain(|spec, _| specs.contains(spec));
    report_results(&results)
}

/// Prints the totals, and fails if a spec has failed.
fn report_results(results: &SpecResults) -> Result<()> {
    let (mut passed, mut skipped, mut failed) = (0, BTreeMap::<&str, usize>::new(), Vec::new());
    for (spec, result) in &results.specs {
        match result {
            SpecResult::Passed => passed += 1,
            SpecResult::Skipped { reason } => *skipped.entry(reason).or_default() += 1,
            SpecResult::Failed { reason } => failed.push(format!("{spec}: {reason}")),
        }
    }
    println!("{passed} specs passed");
    for (reason, count) in &skipped {
        println!("{count} skipped: {reason}");
    }
    ensure!(failed.is_empty(), "{} specs failed:\n{}", failed.len(), failed.join("\n"));
    Ok(())
}

impl SpecResults {
    fn path() -> PathBuf {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("external-storage.json")
    }

    /// The results of this image; none if they are another one's.
    fn load() -> Result<Self> {
        let path = image_file()?;
        let image = fs::metadata(&path).and_then(|file| file.modified()).context("look at the image")?;
        let image = format!("{} of {image:?}", path.display());
        let stored: Self = match fs::read(Self::path()) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(_) => Self::default(),
        };
        let empty = Self { image: image.clone(), specs: BTreeMap::new() };
        Ok(if stored.image == image { stored } else { empty })
    }

    /// Replaces the file at once, as the run can be interrupted at any time.
    fn save(&self) -> Result<()> {
        let (path, partial) = (Self::path(), Self::path().with_extension("partial"));
        fs::write(&partial, serde_json::to_vec_pretty(self)?).context("write the results")?;
        fs::rename(&partial, &path).context("replace the results")
    }
}

/// The suite's program, and what each of its runs needs.
struct Suite<'a> {
    program: PathBuf,
    arguments: Vec<String>,
    directory: &'a Path,
}

impl<'a> Suite<'a> {
    fn new(kube: &Kube, directory: &'a Path) -> Result<Self> {
        let driver = directory.join("driver.json");
        fs::write(&driver, driver_definition().to_string()).context("write the driver's definition")?;
        let arguments = vec![
            format!("--kubeconfig={}", kube.kubeconfig_file("admin")?.display()),
            format!("--kubectl-path={}", kube.programs().program_path("kubectl").display()),
            format!("--storage.testdriver={}", driver.display()),
            "--provider=skeleton".to_owned(),
            "--ginkgo.no-color".to_owned(),
            "--ginkgo.timeout=30m".to_owned(),
        ];
        let program = gotool::KUBERNETES_E2E.program_path("e2e.test")?;
        Ok(Self { program, arguments, directory })
    }

    /// The names of all specs of the driver.
    fn list_specs(&self) -> Result<Vec<String>> {
        let reports = self.run_program(&["--ginkgo.dry-run", &format!("--ginkgo.focus={FOCUS}")])?;
        let chosen = reports.iter().filter(|spec| spec["State"] == "passed");
        Ok(chosen.map(spec_name).filter(|name| name.contains("External")).collect())
    }

    fn run_spec(&self, name: &str) -> Result<SpecResult> {
        let reports = self.run_program(&[&format!("--ginkgo.focus={}$", quote_pattern(name))])?;
        let spec = reports.iter().find(|spec| spec["LeafNodeType"] == "It" && spec_name(spec) == name);
        let spec = spec.with_context(|| format!("the suite did not report {name:?}"))?;
        let message = spec["Failure"]["Message"].as_str().unwrap_or_default();
        let first_line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        Ok(match spec["State"].as_str().unwrap_or_default() {
            "passed" => SpecResult::Passed,
            "skipped" if !message.is_empty() => SpecResult::Skipped { reason: first_line.to_owned() },
            state => SpecResult::Failed { reason: format!("{state}: {message}") },
        })
    }

    /// Runs the program, and gives the reports of its specs. It fails if a spec fails, so the report counts.
    fn run_program(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let report = self.directory.join("report.json");
        // An earlier run's must not be taken for this one's.
        if report.exists() {
            fs::remove_file(&report).context("remove the last report")?;
        }
        let mut command = Command::new(&self.program);
        command.current_dir(self.directory).args(&self.arguments).args(arguments);
        command.arg(format!("--ginkgo.json-report={}", report.display()));
        let run = command_output(&mut command);
        let text = match (fs::read(&report), run) {
            (Ok(text), _) => text,
            (Err(_), Err(error)) => return Err(error),
            (Err(error), Ok(_)) => return Err(error).context("the suite wrote no report"),
        };
        let suites: Vec<Value> = serde_json::from_slice(&text).context("read the suite's report")?;
        let specs = suites.iter().flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
        Ok(specs.cloned().collect())
    }
}

/// What the suite may expect of provisionerd.
///
/// *Source:* Kubernetes 1.36, `test/e2e/storage/external/external.go` and `framework/testdriver.go`.
fn driver_definition() -> Value {
    json!({
        "ShortName": "nodekeel",
        "StorageClass": {"FromExistingClassName": "nodekeel"},
        "DriverInfo": {
            "Name": DRIVER,
            "SupportedSizeRange": {"Min": "1Mi"},
            "SupportedFsType": {"": {}},
            "TopologyKeys": [format!("topology.{DRIVER}/node")],
            "RequiredAccessModes": ["ReadWriteOnce"],
            "Capabilities": {
                "persistence": true,
                "exec": true,
                "fsGroup": true,
                "multipods": true,
                "singleNodeVolume": true,
                "topology": true,
                "readWriteOncePod": true,
            },
        },
    })
}

/// The name by which the suite's focus finds a spec.
fn spec_name(spec: &Value) -> String {
    let texts = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten();
    let texts: Vec<&str> = texts.chain([&spec["LeafNodeText"]]).filter_map(Value::as_str).collect();
    texts.join(" ")
}

/// A regular expression that only this text matches.
fn quote_pattern(text: &str) -> String {
    let quote = |letter: char| match letter {
        letter if letter.is_ascii_punctuation() => format!("\\{letter}"),
        letter => letter.to_string(),
    };
    text.chars().map(quote).collect()
}
