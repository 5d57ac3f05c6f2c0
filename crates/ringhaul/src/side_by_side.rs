//! The same for many things at once, on a few threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls `call` for each of `list` and returns the results in the order of the list. What waits for
/// one disk does not hold up the others. There are no more threads than CPUs, because what is
/// measured meanwhile should not wait for one.
pub(crate) fn side_by_side<T: Sync, R: Send>(list: &[T], call: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = list.len().min(cpus.max(2));
    if threads < 2 {
        return list.iter().map(call).collect();
    }
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((index, item)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    list.get(index).map(|item| (index, item))
                } {
                    let result = call(item);
                    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                    results.push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn all_are_called_once_and_answers_have_the_order_of_the_list() {
        for count in [0, 1, 2, 100] {
            let list: Vec<usize> = (0..count).collect();
            let expected: Vec<usize> = list.iter().map(|number| number * 2).collect();
            assert_eq!(side_by_side(&list, |number| number * 2), expected);
        }
    }

    #[test]
    fn one_that_waits_does_not_hold_up_another() {
        // Both must be called for either to return.
        let both = Barrier::new(2);
        assert_eq!(side_by_side(&[1, 2], |_| both.wait().is_leader()).len(), 2);
    }
}
