// What the exported functions take, told to Python: when the library is loaded, `arguments.py` compares it with the
// declarations of `functions.py`. A field that moved on one side only is an error then, not a number read as an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace quire {

// A field's type as Python's `struct` writes it.
template <class T>
constexpr char type_letter() {
  if constexpr (std::is_pointer_v<T>) return 'P';
  if constexpr (std::is_same_v<T, int64_t>) return 'q';
  if constexpr (std::is_same_v<T, int>) return 'i';
  static_assert(std::is_pointer_v<T> || std::is_same_v<T, int64_t> || std::is_same_v<T, int> || std::is_same_v<T, float>);
  return 'f';
}

// A field's type and its place in the struct.
struct Field {
  char letter;
  int64_t offset;
};

// "x, rows;P0 q8;16": names, types and offsets, and the size of all.
std::string described(const char* names, const Field* fields, size_t count, size_t size);

template <class... Fields>
std::string described(const char* names, const void* begin, size_t size, const Fields&... fields) {
  const Field all[] = {{type_letter<Fields>(), reinterpret_cast<const char*>(&fields) - static_cast<const char*>(begin)}...};
  return described(names, all, sizeof...(Fields), size);
}

}  // namespace quire

// In a struct of arguments: its fields, all of them, in their order.
#define QUIRE_ARGUMENTS(...) \
  std::string describe() const { return quire::described(#__VA_ARGS__, this, sizeof(*this), __VA_ARGS__); }

// All else is hidden: two libraries in one process (tests load several) would share what has the same name in both, and
// tables are of other sizes on other instruction sets.
#define QUIRE_EXPORT __attribute__((visibility("default")))

// Exports what a struct holds.
#define QUIRE_DESCRIBE(name, ...)                             \
  QUIRE_EXPORT const char* quire_##name##_arguments() {       \
    static const std::string text = __VA_ARGS__{}.describe(); \
    return text.c_str();                                      \
  }

// Exports a function that runs `statement` on its arguments, `call`, whose type comes last.
#define QUIRE_FUNCTION(name, statement, ...)                             \
  QUIRE_EXPORT void quire_##name(const __VA_ARGS__* call) { statement; } \
  QUIRE_DESCRIBE(name, __VA_ARGS__)

// Exports names whose positions are numbers on both sides.
#define QUIRE_NAMES(name, ...) \
  QUIRE_EXPORT const char* quire_##name() { return QUIRE_TEXT(__VA_ARGS__); }
#define QUIRE_TEXT(...) #__VA_ARGS__
