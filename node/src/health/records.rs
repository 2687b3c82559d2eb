//! Records of processes that noded can't use: what an earlier noded has left behind may still run.

use std::path::Path;

use nodekeel_supervisor::process::RecordProblem;

use super::{HealthCondition, NODE_PART};
use crate::program_name::program_name;

/// The conditions of records, while they are there: an operator removes the one whose processes have ended.
pub(crate) fn record_conditions(problems: Vec<RecordProblem>) -> Vec<HealthCondition> {
    // The warning ends when the operator has removed the record.
    let remaining = problems
        .into_iter()
        .filter(|problem| !matches!(problem, RecordProblem::Record { path, .. } if !path.exists()));
    remaining.filter_map(record_condition).collect()
}

fn record_condition(problem: RecordProblem) -> Option<HealthCondition> {
    let program = program_name();
    let left = format!("processes of an earlier {program} may still run");
    let warning = |path: &Path, problem: String, hint: String| HealthCondition {
        part: NODE_PART.to_owned(),
        ..HealthCondition::warning(path.display().to_string(), problem).hint(hint)
    };
    match problem {
        RecordProblem::Record { path, reason } => {
            let shown = path.display();
            let hint = format!(
                "`ps -eo pid,ppid,args`: end what an earlier {program} has left behind, then `rm {shown}`"
            );
            Some(warning(&path, format!("can't be read, so {left}: {reason}"), hint))
        }
        RecordProblem::Directory { path, reason } => {
            let hint = format!(
                "`ps -eo pid,ppid,args`: end what an earlier {program} has left behind; correct the directory, then restart {program}"
            );
            let problem = format!("can't be used, so {left}, and no service is kept: {reason}");
            Some(warning(&path, problem, hint))
        }
        _ => None,
    }
}
