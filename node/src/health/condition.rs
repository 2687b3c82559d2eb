//! Conditions: problems and warnings, with their own texts.

use std::fmt;
use std::time::SystemTime;

/// The severity of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature: the node is healthy, or it is not")]
pub enum ConditionSeverity {
    /// The node does not do all that it is configured to do: it is not healthy.
    Problem,
    /// The node will have a problem if nothing is done. It is healthy.
    Warning,
}

impl ConditionSeverity {
    /// `problem` or `warning`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
        }
    }
}

/// A problem or a warning. [`Display`](fmt::Display) shows object and problem.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealthCondition {
    /// The part that reports it: set by the node.
    pub part: String,
    /// Problem or warning.
    pub severity: ConditionSeverity,
    /// The object: a DN, a path, a name.
    pub object: String,
    /// The end of a sentence about the object.
    pub problem: String,
    /// Since when, by the wall clock as it is set now. Default: since the node first found it.
    pub since: Option<SystemTime>,
    /// How often it has begun, at times that are at most an hour apart; 0 before the node has counted it.
    pub count: u32,
    /// The thing that the object waits for; empty if it waits for nothing.
    pub waiting_for: String,
    /// The command to type, or the thing to do; empty if there is nothing to do but wait.
    pub hint: String,
}

impl HealthCondition {
    /// A problem of this object: "fan 1", "does not turn".
    pub fn problem(object: impl Into<String>, problem: impl Into<String>) -> Self {
        let (object, problem) = (object.into(), problem.into());
        let (part, waiting_for, hint) = (String::new(), String::new(), String::new());
        Self {
            part,
            severity: ConditionSeverity::Problem,
            object,
            problem,
            since: None,
            count: 0,
            waiting_for,
            hint,
        }
    }

    /// A warning about this object: "fan 1", "is loud".
    pub fn warning(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { severity: ConditionSeverity::Warning, ..Self::problem(object, problem) }
    }

    pub(crate) fn is_problem(&self) -> bool {
        self.severity == ConditionSeverity::Problem
    }

    /// Sets since when, if the source knows it better than by when it was first asked.
    #[must_use]
    pub fn since(self, since: Option<SystemTime>) -> Self {
        Self { since, ..self }
    }

    /// Sets what the object waits for.
    #[must_use]
    pub fn waiting_for(self, awaited: impl Into<String>) -> Self {
        Self { waiting_for: awaited.into(), ..self }
    }

    /// Sets what to type or do.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: hint.into(), ..self }
    }
}

impl fmt::Display for HealthCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.object, self.problem)
    }
}
