//! Zipf's law by rejection-inversion: constant memory and time per draw, for any range of numbers.
//!
//! W. Hörmann and G. Derflinger, Rejection-inversion to generate variates from monotone discrete
//! distributions, ACM Transactions on Modeling and Computer Simulation 6(3), 1996, section 3 with
//! the example of the Zipf distribution.

use super::random::{hash, unit};

/// A distribution of numbers from 0 to n - 1. The frequency of k is proportional to
/// (k + 1)^-exponent.
#[derive(Clone, Copy, Debug)]
pub struct Zipf {
    count: f64,
    exponent: f64,
    /// Integral of the hat up to 1.5, less the height at 1.
    integral_low: f64,
    /// Integral of the hat up to n + 0.5.
    integral_high: f64,
    /// A candidate this close to its number is accepted without a further test.
    shortcut: f64,
}

impl Zipf {
    /// Makes the distribution over `count` numbers.
    pub fn new(count: u64, exponent: f64) -> Self {
        let mut zipf = Self { count: count as f64, exponent, integral_low: 0.0, integral_high: 0.0, shortcut: 0.0 };
        zipf.integral_low = zipf.integral(1.5) - 1.0;
        zipf.integral_high = zipf.integral(zipf.count + 0.5);
        zipf.shortcut = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.height(2.0));
        zipf
    }

    /// Draws a number from random bits. A rejected draw hashes them to new bits.
    pub fn draw(&self, bits: u64) -> u64 {
        let mut bits = bits;
        loop {
            let u = self.integral_high + unit(bits) * (self.integral_low - self.integral_high);
            let x = self.inverse(u);
            let k = (x + 0.5).floor().clamp(1.0, self.count);
            if k - x <= self.shortcut || u >= self.integral(k + 0.5) - self.height(k) {
                return k as u64 - 1;
            }
            bits = hash(bits);
        }
    }

    fn height(&self, x: f64) -> f64 {
        x.powf(-self.exponent)
    }

    /// Computes (x^(1-s) - 1) / (1 - s), which tends to ln x as s tends to 1.
    fn integral(&self, x: f64) -> f64 {
        let (log, rest) = (x.ln(), 1.0 - self.exponent);
        if rest.abs() < 1e-9 { log } else { (rest * log).exp_m1() / rest }
    }

    fn inverse(&self, y: f64) -> f64 {
        let rest = 1.0 - self.exponent;
        // Rounding must not take the argument of the logarithm below zero.
        if rest.abs() < 1e-9 { y.exp() } else { ((y * rest).max(-1.0).ln_1p() / rest).exp() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_the_law() {
        let draws = 200_000;
        for exponent in [0.0, 0.5, 1.0, 1.5, 2.0] {
            for count in [1, 2, 10, 1000] {
                let zipf = Zipf::new(count, exponent);
                let mut seen = vec![0u64; count as usize];
                (0..draws).for_each(|at| seen[zipf.draw(hash(at)) as usize] += 1);
                let total: f64 = (1..=count).map(|k| (k as f64).powf(-exponent)).sum();
                for (k, &times) in seen.iter().enumerate().take(10) {
                    let expected = draws as f64 * ((k + 1) as f64).powf(-exponent) / total;
                    // Six standard deviations. The draws are the same every time.
                    let tolerance = 6.0 * expected.sqrt() + 1.0;
                    assert!(
                        (times as f64 - expected).abs() < tolerance,
                        "exponent {exponent}, {count} numbers: number {k} came {times} times, not {expected:.0}"
                    );
                }
            }
        }
    }
}
