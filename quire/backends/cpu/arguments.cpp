// What all structs of arguments share: the text that tells them.
#include "arguments.h"

namespace quire {

std::string described(const char* names, const Field* fields, size_t count, size_t size) {
  std::string text = std::string(names) + ";";
  for (size_t i = 0; i < count; ++i) text += fields[i].letter + std::to_string(fields[i].offset) + " ";
  text.back() = ';';
  return text + std::to_string(size);
}

}  // namespace quire
