//! Results as JUnit XML, which CI systems show.
//!
//! *Source:* the format of Apache Ant's junit task, as testmoapp/junitxml describes it.

use super::Part;

/// One `testsuite` for each part; a part that is one check has one `testcase`.
pub(super) fn to_xml(parts: &[Part]) -> String {
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n");
    for part in parts {
        let (name, count) = (escape(&part.name), part.passed + part.failed);
        xml += &format!(
            "<testsuite name=\"{name}\" tests=\"{count}\" failures=\"{}\" time=\"{:.3}\">\n",
            part.failed, part.seconds
        );
        for test in &part.tests {
            xml += &test_case(&name, &test.name, test.seconds, test.failure.as_deref());
        }
        if part.tests.is_empty() {
            let failure = (part.failed > 0).then_some("see the run's problems");
            xml += &test_case(&name, &part.name, part.seconds, failure);
        }
        xml += "</testsuite>\n";
    }
    xml + "</testsuites>\n"
}

fn test_case(class: &str, name: &str, seconds: f64, failure: Option<&str>) -> String {
    let failure = failure.map(|text| format!("<failure>{}</failure>", escape(text))).unwrap_or_default();
    let name = escape(name);
    format!("<testcase classname=\"{class}\" name=\"{name}\" time=\"{seconds:.3}\">{failure}</testcase>\n")
}

/// XML 1.0 knows no control characters but tab and line breaks.
fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;");
    text.chars().filter(|c| !c.is_control() || matches!(c, '\t' | '\n' | '\r')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::TestResult;

    #[test]
    fn tests_and_checks_are_cases_and_text_is_escaped() {
        let failure = Some("left < right\u{1b}".to_owned());
        let tests = vec![TestResult { name: "a::\"b\"".into(), seconds: 0.5, failure }];
        let xml = to_xml(&[
            Part { name: "x it".into(), passed: 0, failed: 1, seconds: 1.0, tests },
            Part { name: "docs".into(), passed: 1, failed: 0, seconds: 2.0, tests: Vec::new() },
        ]);
        let case = "<testcase classname=\"x it\" name=\"a::&quot;b&quot;\" time=\"0.500\">\
                    <failure>left &lt; right</failure></testcase>";
        assert!(xml.contains(case), "{xml}");
        assert!(xml.contains("<testsuite name=\"docs\" tests=\"1\" failures=\"0\" time=\"2.000\">"), "{xml}");
    }
}
