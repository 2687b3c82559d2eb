//! Plain tables for terminals and logs.

use std::fmt;

/// Rows of text under a header, printed in columns as wide as their widest cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The header first; every row has as many cells.
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these column names.
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { rows: vec![header.map(String::from).to_vec()] }
    }

    /// Adds a row; missing cells are empty, surplus ones are dropped.
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) -> &mut Self {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.rows[0].len(), String::new());
        self.rows.push(cells);
        self
    }

    fn column_widths(&self) -> Vec<usize> {
        let columns = self.rows[0].len();
        (0..columns).map(|c| self.rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0)).collect()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.column_widths();
        for (index, row) in self.rows.iter().enumerate() {
            let cells =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width));
            let line = cells.collect::<Vec<_>>().join("  ");
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["id", "work"]);
        table.add_row(["restart", "kill"]).add_row(["a"]);
        assert_eq!(table.to_string(), "id       work\nrestart  kill\na");
    }
}
